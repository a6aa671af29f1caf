"""/v1/messages: texts and prompts are those of chat, events come in the documented order."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dsa_engine import LLM
from dsa_engine.server.forms.messages import CountRequest

PATH = "/v1/messages"
HELLO: Any = [{"role": "user", "content": "Hello"}]
UNIT = {"type": "object", "properties": {"unit": {"enum": ["C", "F"]}}, "required": ["unit"]}
TOOLS = [{"name": name, "description": "of a day", "input_schema": UNIT} for name in ("heat", "cold")]


def text(words: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": words}]


def events(server: Any, **body: Any) -> list[dict[str, Any]]:
    """The events of a stream, which have the names of their types."""
    texts = server.post(PATH, json=body | {"stream": True}).text.split("\n\n")[:-1]
    read = [json.loads(one.partition("\ndata: ")[2]) for one in texts]
    assert all(one.startswith(f"event: {event['type']}\n") for one, event in zip(texts, read))
    return read


def refused(server: Any, path: str = PATH, status: int = 400, **body: Any) -> tuple[str, str]:
    """Type and message of an error in Anthropic's form."""
    response = server.post(path, json=body)
    answer = response.json()
    assert response.status_code == status and answer["type"] == "error" and answer.keys() == {"type", "error"}
    return answer["error"]["type"], answer["error"]["message"]


def test_text(server: Any) -> None:
    given = {"temperature": 0, "max_tokens": 9}
    chat = server.chat([{"role": "system", "content": "Be short."}, *HELLO], **given)
    said, prompt = chat["choices"][0]["message"]["content"], chat["usage"]["prompt_tokens"]
    cached = {"type": "text", "text": "Be short.", "cache_control": {"type": "ephemeral"}}
    body = given | {"system": [*text("x-anthropic-billing-header: cch=fa690;"), cached], "messages": HELLO}
    whole = server.answer(f"{PATH}?beta=true", **body, metadata={"user_id": "u"}, betas=["x"])
    assert whole == {
        "id": whole["id"], "type": "message", "role": "assistant", "model": "demo", "stop_sequence": None,
        "content": text(said), "stop_reason": "max_tokens",
        "usage": {"input_tokens": prompt, "cache_read_input_tokens": 0, "cache_creation_input_tokens": 0,
                  "output_tokens": 9, "output_tokens_details": {"thinking_tokens": 0}},
    }  # fmt: skip
    assert server.answer(f"{PATH}/count_tokens", **body | {"max_tokens": None}) == {"input_tokens": prompt}
    start, begin, *deltas, end, last, stop = events(server, **body)
    assert start["message"]["content"] == [] and start["message"]["stop_reason"] is None
    assert start["message"]["usage"]["input_tokens"] == prompt and begin["content_block"]["text"] == ""
    assert "".join(one["delta"]["text"] for one in deltas) == said and end["index"] == begin["index"] == 0
    assert last["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None} and last["usage"] == whole["usage"]
    assert stop == {"type": "message_stop"}
    cut = server.answer(PATH, **body, stop_sequences=[stops := said[2:4]])
    assert cut["content"] == text(said.partition(stops)[0])
    assert (cut["stop_reason"], cut["stop_sequence"]) == ("stop_sequence", stops)
    ended = server.answer(PATH, **body, allowed_token_ids=[1])
    assert ended["stop_reason"] == "end_turn" and ended["content"] == text("")


def test_thoughts_and_calls(server: Any, cut_reader: None) -> None:
    body = {"messages": HELLO, "tools": TOOLS, "allowed_token_ids": [1], "max_tokens": 3}
    whole = server.answer(PATH, **body, thinking={"type": "enabled", "budget_tokens": 1024})
    thought, *others = whole["content"]
    assert thought["type"] == "thinking" and thought["thinking"] == "Hm, so"
    assert others == [
        *text("I look"),
        {"type": "tool_use", "id": "call_0", "name": "weather", "input": {"city": "Rome"}},
        {"type": "tool_use", "id": "call_1", "name": "weather", "input": {}},
    ]
    assert whole["stop_reason"] == "tool_use" and whole["usage"]["output_tokens_details"] == {"thinking_tokens": 1}
    _, *parts, _, _ = events(server, **body)
    about = [(one["index"], one["type"]) for one in parts if "delta" not in one]
    assert about == [(index, f"content_block_{kind}") for index in range(4) for kind in ("start", "stop")]
    assert parts[0]["content_block"] == {"type": "thinking", "thinking": "", "signature": ""}
    assert [(one["index"], *one["delta"].values()) for one in parts if "delta" in one] == [
        (0, "thinking_delta", "Hm, "), (0, "thinking_delta", "so"), (0, "signature_delta", thought["signature"]),
        (1, "text_delta", "I "), (1, "text_delta", "look"),
        (2, "input_json_delta", '{"city": '), (2, "input_json_delta", '"Rome"}'), (3, "input_json_delta", "{}"),
    ]  # fmt: skip
    assert server.answer(PATH, **body, thinking={"type": "adaptive", "display": "omitted"})["content"] == others


def test_a_conversation_of_blocks() -> None:
    """What was answered comes back as blocks; the chat request that asks for the same has them as messages."""
    result = {"type": "tool_result", "tool_use_id": "c", "content": text("14 °C")}
    thoughts = [{"type": "thinking", "thinking": "Hm", "signature": "x"}, {"type": "redacted_thinking", "data": "y"}]
    use = {"type": "tool_use", "id": "c", "name": "heat", "input": {"unit": "C"}}
    given = [
        *HELLO,
        {"role": "assistant", "content": [*thoughts, *text("I look"), use]},
        {"role": "user", "content": [result, *text("And now?")]},
        {"role": "assistant", "content": "It is"},
    ]
    thinking, config = {"type": "enabled", "budget_tokens": 9}, {"effort": "low", "format": {"type": "json_schema"}}
    body = {"messages": given, "tools": TOOLS, "thinking": thinking, "output_config": config, "top_k": 5}
    asked = CountRequest.model_validate(body).chat
    call = {"id": "c", "type": "function", "function": {"name": "heat", "arguments": {"unit": "C"}}}
    assert asked.messages == [
        {"role": "user", "content": text("Hello")},
        {"role": "assistant", "content": text("I look"), "reasoning_content": "Hm", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": text("14 °C")},
        {"role": "user", "content": text("And now?")},
        {"role": "assistant", "content": text("It is")},
    ]
    assert asked.tools[0]["function"] == {"name": "heat", "description": "of a day", "parameters": UNIT}
    assert asked.thinking == thinking and asked.reasoning_effort == "low" and asked.continue_final_message
    assert asked.response_format == {"type": "json_schema", "json_schema": {}}
    assert asked.model_extra == {"top_k": 5}


def test_a_call_that_is_enforced(server: Any) -> None:
    choice = {"type": "tool", "name": "cold", "disable_parallel_tool_use": True}
    answer = server.answer(PATH, messages=HELLO, tools=TOOLS, tool_choice=choice, max_tokens=300, seed=1)
    (call,) = answer["content"]
    assert call["name"] == "cold" and call["input"]["unit"] in ("C", "F") and answer["stop_reason"] == "tool_use"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"max_tokens": None}, "max_tokens: Field required"),
        ({"max_tokens": 4096}, "context length is 2048 tokens, and max_tokens is 4096"),
        ({"messages": [{"role": "bot", "content": "a"}]}, "the roles user, assistant, system, not 'bot'"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "text only"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result", "content": [{}]}]}]}, "text only"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "the server has none"),
        ({"mcp_servers": [{"url": "x"}]}, "the server calls no tools"),
    ],
)
def test_what_is_not_possible_is_said(server: Any, given: dict[str, Any], words: str) -> None:
    kind, message = refused(server, **({"messages": HELLO, "max_tokens": 4} | given))
    assert words in message and kind == "invalid_request_error"


def test_errors_of_the_server(server: Any, serve: Any, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their types, also in a stream; both headers that may have the key."""
    given: dict[str, Any] = {"messages": HELLO, "max_tokens": 1}
    assert refused(server, status=404, **given, model="x")[0] == "not_found_error"
    closed = serve(llm, api_key="k")
    assert refused(closed, status=401, **given)[0] == "authentication_error"
    for name, key, status in (("x-api-key", "k", 200), ("Authorization", "Bearer k", 200), ("x-api-key", "", 401)):
        assert closed.post(PATH, json=given, headers={name: key}).status_code == status
    monkeypatch.setattr("dsa_engine.server.generation.failure_of", lambda _: "no room")
    assert refused(server, status=500, **given)[0] == "api_error"
    assert events(server, **given)[-1] == {
        "type": "error", "error": {"type": "api_error", "message": "an output failed: no room"}
    }  # fmt: skip
