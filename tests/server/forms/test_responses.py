"""/v1/responses with the ``openai`` client: text, tools and streams are those of chat completions."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from openai import OpenAI
from pydantic import BaseModel

from dsa_engine import LLM, SamplingParams
from dsa_engine.outputs import RequestMetrics, StreamPiece
from dsa_engine.server.forms.responses import ResponsesForm

HELLO: Any = [{"role": "user", "content": "Hello"}]
TOOLS: Any = [{"type": "function", "name": "weather", "parameters": {"type": "object", "properties": {}}}]


@pytest.fixture
def client(server: Any) -> OpenAI:
    return OpenAI(base_url=f"{server.base_url}/v1", api_key="none", max_retries=0)


def test_text(client: OpenAI, llm: LLM) -> None:
    messages = [{"role": "system", "content": "Be short."}, *HELLO]
    (wanted,) = llm.chat(messages, SamplingParams(temperature=0, max_tokens=9))  # type: ignore[arg-type]
    given: Any = {
        "model": "demo",
        "instructions": "Be short.",
        "temperature": 0,
        "max_output_tokens": 9,
        "store": False,
    }
    parts = [{"role": "user", "content": [{"type": "input_text", "text": "Hello"}]}]
    for asked in ("Hello", HELLO, parts):
        response = client.responses.create(input=asked, **given)
        assert response.output_text == wanted.text and response.status == "incomplete"
        assert response.incomplete_details is not None and response.usage is not None
        assert response.incomplete_details.reason == "max_output_tokens" and response.usage.output_tokens == 9
        assert response.usage.total_tokens == len(wanted.prompt_token_ids) + 9
    with client.responses.stream(input="Hello", **given) as stream:
        events = list(stream)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == wanted.text
    assert events[-1].type == "response.incomplete" and events[-1].response.output_text == wanted.text
    assert events[-1].response.usage.total_tokens == len(wanted.prompt_token_ids) + 9
    ended = client.responses.create(model="demo", input="Hello", extra_body={"allowed_token_ids": [1]})
    assert ended.status == "completed" and ended.output_text == ""


def test_thoughts_and_calls(client: OpenAI, cut_reader: None) -> None:
    given: Any = {"model": "demo", "input": "Hello", "tools": TOOLS, "max_output_tokens": 3}
    extra = {"ignore_eos": True, "include": ["message.output_text.logprobs"]}
    whole = client.responses.create(**given, extra_body=extra)
    streamed = None
    added, deltas, whole_texts = [], [""] * 4, [""] * 4
    for event in client.responses.create(**given, extra_body=extra, stream=True):
        if event.type == "response.output_item.added":
            added.append(event.item.type)
        elif event.type.endswith(".delta"):
            deltas[event.output_index] += event.delta  # type: ignore[union-attr]
        elif event.type.endswith("text.done") or event.type.endswith("arguments.done"):
            read: Any = event
            whole_texts[read.output_index] = read.text if event.type.endswith("text.done") else read.arguments
        elif event.type == "response.incomplete":
            streamed = event.response
    assert streamed is not None and added == ["reasoning", "message", "function_call", "function_call"]
    assert deltas == whole_texts == ["Hm, so", "I look", '{"city": "Rome"}', "{}"]
    for response in (whole, streamed):
        thought, message, first, second = (item.to_dict() for item in response.output)
        assert thought["content"] == [{"type": "reasoning_text", "text": "Hm, so"}]
        assert response.output_text == "I look" and message["role"] == "assistant"
        assert (first["name"], first["call_id"], first["arguments"]) == ("weather", "call_0", '{"city": "Rome"}')
        assert (second["call_id"], second["arguments"]) == ("call_1", "{}")
        assert response.usage is not None and response.usage.output_tokens_details.reasoning_tokens == 3
    assert len(whole.output[1].content[0].logprobs) == 3  # type: ignore[union-attr,arg-type,index]


def test_a_conversation_of_items(client: OpenAI, llm: LLM, server: Any) -> None:
    """What was answered comes back as items; the prompt is that of the same messages in a chat request."""
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    messages = [
        {"role": "system", "content": "Be short."},
        {"role": "system", "content": "Be kind."},
        *HELLO,
        {"role": "assistant", "reasoning_content": "Hm", "content": "I look", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "14 °C"},
        {"role": "assistant", "content": "14"},
        {"role": "user", "content": "And now?"},
    ]
    items: Any = [
        {"role": "developer", "content": "Be kind."},
        *HELLO,
        {"type": "reasoning", "id": "rs", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm"}]},
        {"type": "message", "id": "m", "role": "assistant", "status": "completed",
         "content": [{"type": "output_text", "text": "I look", "annotations": []}]},
        {"type": "function_call", "call_id": "c", "name": "weather", "arguments": '{"city": "Rome"}'},
        {"type": "function_call_output", "call_id": "c", "output": "14 °C"},
        {"role": "assistant", "content": "14"},
        {"role": "user", "content": "And now?"},
    ]  # fmt: skip
    template = "{{ tools | tojson }}{{ reasoning_effort }}{{ messages | tojson }}"
    chat_tools = [{"type": "function", "function": {k: v for k, v in TOOLS[0].items() if k != "type"}}]
    more = {"chat_template": template, "temperature": 0}
    wanted = server.chat(messages, tools=chat_tools, max_tokens=6, reasoning_effort="low", **more)
    given: Any = {"model": "demo", "input": items, "instructions": "Be short.", "tools": TOOLS, "max_output_tokens": 6}
    response = client.responses.create(**given, reasoning={"effort": "low"}, extra_body=more)
    assert response.usage is not None and response.usage.input_tokens == wanted["usage"]["prompt_tokens"]
    assert response.output_text == wanted["choices"][0]["message"]["content"]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"input": [{"type": "item_reference", "id": "x"}]}, "nothing is stored"),
        ({"previous_response_id": "x"}, "send the whole conversation"),
        ({"background": True}, "answered at once"),
        ({"tools": [{"type": "web_search"}]}, "no other tools are here"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "text only"),
        ({"reasoning": {"effort": "extreme"}}, "reasoning.effort"),
        ({"max_output_tokens": 10_000}, "max_output_tokens is 10000"),
        ({"input": []}, "the conversation is empty"),
        ({"input": [{"type": "reasoning", "content": 5}, *HELLO]}, "no list of texts"),
        ({"n": 2}, "n must be 1"),
    ],
)  # fmt: skip
def test_what_is_not_possible_is_said(server: Any, given: dict[str, Any], words: str) -> None:
    assert words in server.refused("/v1/responses", **({"input": "Hello"} | given))


class Weather(BaseModel):
    good: bool


def test_an_answer_with_a_schema(client: OpenAI) -> None:
    """The client's ``parse``: text.format is the response_format of chat requests."""
    parsed = client.responses.parse(model="demo", input="Hello", text_format=Weather, max_output_tokens=300)
    assert isinstance(parsed.output_parsed, Weather) and parsed.status == "completed"


def test_an_error_in_a_stream(client: OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = StreamPiece("", finish_reason="error", error="no room", metrics=RequestMetrics(0.0, None))
    monkeypatch.setattr(ResponsesForm, "chunks", lambda *_: [])
    monkeypatch.setattr("dsa_engine.server.generation.failure_of", lambda _: failed.error)
    (event,) = client.responses.create(model="demo", input="Hello", max_output_tokens=2, stream=True)
    assert event.type == "response.failed" and event.response.error is not None
    assert "no room" in event.response.error.message
    with pytest.raises(openai.InternalServerError, match="no room"):
        client.responses.create(model="demo", input="Hello", max_output_tokens=2)


def test_events_have_their_names(server: Any) -> None:
    lines = server.post("/v1/responses", json={"input": "a", "stream": True, "max_output_tokens": 1}).text.split("\n\n")
    assert lines.pop() == ""
    for line in lines:
        name, data = line.split("\n")
        assert json.loads(data.removeprefix("data: "))["type"] == name.removeprefix("event: ")
