"""/v1/chat/completions: messages, thoughts and tool calls, whole and streamed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from dsa_engine import LLM, SamplingParams
from dsa_engine.text.conversations import ConversationFormat, MessageDelta

HELLO = [{"role": "user", "content": "Hello"}]
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}]


def test_the_answer_is_that_of_chat(server: Any, llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=12, logprobs=2)
    (wanted,) = llm.chat(HELLO, params)  # type: ignore[arg-type]
    given = {"temperature": 0, "max_completion_tokens": 12, "return_token_ids": True}
    answer = server.chat(HELLO, **given, logprobs=True, top_logprobs=2)
    (choice,) = answer["choices"]
    assert choice["message"] == {
        "role": "assistant", "content": wanted.text, "refusal": None, "reasoning_content": None, "reasoning": None
    }  # fmt: skip
    assert (choice["token_ids"], answer["prompt_token_ids"]) == (wanted.token_ids, wanted.prompt_token_ids)
    assert wanted.logprobs is not None
    for entry, token, of_token in zip(choice["logprobs"]["content"], wanted.token_ids, wanted.logprobs, strict=True):
        assert entry["logprob"] == pytest.approx(of_token[token], abs=1e-4) and len(entry["top_logprobs"]) == 2
        assert bytes(entry["bytes"]).decode(errors="replace") == entry["token"] == of_token[token].decoded_token
    body = {"messages": HELLO, **given, "stream": True, "logprobs": True, "stream_options": {"include_usage": True}}
    *chunks, last = server.events("/v1/chat/completions", **body)
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert "".join(choice["delta"].get("content", "") for choice in choices) == wanted.text
    assert [token for choice in choices for token in choice.get("token_ids", [])] == wanted.token_ids
    entries = [entry for choice in choices if choice["logprobs"] for entry in choice["logprobs"]["content"]]
    assert len(entries) == 12 and entries[3]["top_logprobs"] == []
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["length"]
    assert last["usage"] == answer["usage"] | {"prompt_tokens_details": last["usage"]["prompt_tokens_details"]}


def test_several_answers_and_no_limit(server: Any) -> None:
    given = {"n": 3, "seed": 1, "temperature": 1.0, "logit_bias": {"1": 4}}  # each ends by the end token
    whole = [one["message"]["content"] for one in server.chat(HELLO, **given)["choices"]]
    body = {"messages": HELLO, "stream": True, **given}
    streamed = ["", "", ""]
    for chunk in server.events("/v1/chat/completions", **body):
        for choice in chunk["choices"]:
            streamed[choice["index"]] += choice["delta"].get("content", "")
    assert streamed == whole and len(set(whole)) > 1


class CutReader:
    """Reads an answer as a thought, a content and two calls, whatever its text is."""

    def push(self, text: str) -> list[MessageDelta]:
        return [MessageDelta("reasoning", text)] if text else []

    def finish(self, whole: bool) -> list[MessageDelta]:
        return [
            MessageDelta("content", "so"),
            MessageDelta("call", '{"city": ', 0, "call_0", "weather"),
            MessageDelta("call", '"Rome"}', 0),
            MessageDelta("call", "{}", 1, "call_1", "time"),
        ]


@pytest.fixture
def cut_reader(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Makes every answer a :class:`CutReader`'s; with which tools readers were made, and whether for several calls."""
    tools: list[Any] = []
    monkeypatch.setattr(
        ConversationFormat,
        "reader",
        lambda self, text, given, several, must: (tools.append((given, several)), CutReader())[1],
    )
    yield tools


def test_thoughts_and_tool_calls(server: Any, cut_reader: list[Any]) -> None:
    given: dict[str, Any] = {"temperature": 0, "max_tokens": 4, "tools": TOOLS}
    (choice,) = server.chat(HELLO, **given, return_token_ids=True)["choices"]
    assert choice["finish_reason"] == "length", "the last call may be cut"
    given["stop_token_ids"] = choice["token_ids"][-1:]
    (choice,) = server.chat(HELLO, **given)["choices"]
    message = choice["message"]
    assert choice["finish_reason"] == "tool_calls" and message["content"] == "so"
    assert message["reasoning"] == message["reasoning_content"] != ""
    calls = [(call["id"], call["type"], call["function"]) for call in message["tool_calls"]]
    assert calls == [
        ("call_0", "function", {"name": "weather", "arguments": '{"city": "Rome"}'}),
        ("call_1", "function", {"name": "time", "arguments": "{}"}),
    ]
    deltas, reasons = [], []
    for chunk in server.events("/v1/chat/completions", messages=HELLO, stream=True, **given):
        deltas.append(chunk["choices"][0]["delta"])
        reasons.append(chunk["choices"][0]["finish_reason"])
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == message["reasoning"]
    assert [piece for delta in deltas for piece in delta.get("tool_calls", [])] == [
        {"index": 0, "id": "call_0", "type": "function", "function": {"name": "weather", "arguments": '{"city": '}},
        {"index": 0, "function": {"arguments": '"Rome"}'}},
        {"index": 1, "id": "call_1", "type": "function", "function": {"name": "time", "arguments": "{}"}},
    ]
    assert reasons[-1] == "tool_calls" and set(reasons[:-1]) == {None}
    message = server.chat(HELLO, **given, tool_choice="none", include_reasoning=False)["choices"][0]["message"]
    server.chat(HELLO, **given, parallel_tool_calls=False)
    assert cut_reader == [(TOOLS, True)] * 3 + [(None, True), (TOOLS, False)] and "reasoning" not in message


def test_forced_calls_without_a_parser(server: Any) -> None:
    """The server's own grammar says how they are written. A named tool is one call, and wins over a form."""
    named = {"type": "function", "function": {"name": "time"}}
    tools = [{"type": "function", "function": {"name": name}} for name in ("weather", "time")]
    given: dict[str, Any] = {"tools": tools, "max_tokens": 200, "seed": 1, "response_format": {"type": "json_object"}}
    for choice, names in ((named, ["time"]), ("required", None)):
        asked = given | {"messages": HELLO, "tool_choice": choice}
        message = server.answer("/v1/chat/completions", **asked)["choices"][0]["message"]
        called = [call["function"]["name"] for call in message["tool_calls"]]
        assert (called == names if names else {"weather", "time"} >= {*called}) and not message["content"]
        chunks = server.events("/v1/chat/completions", **asked, stream=True)
        pieces = [piece for one in chunks for piece in one["choices"][0]["delta"].get("tool_calls", [])]
        assert [piece["function"]["name"] for piece in pieces if "id" in piece] == called


def test_usage_of_a_stream(server: Any, cut_reader: list[Any]) -> None:
    """The first chunk counts no token; thoughts are counted apart."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"messages": HELLO, "stream": True, "stream_options": options, "max_tokens": 4, "ignore_eos": True}
    first, *others = [one["usage"] for one in server.events("/v1/chat/completions", **body)]
    assert first["completion_tokens"] == 0 and others[-1]["completion_tokens"] == 4
    assert others[-1]["completion_tokens_details"] == {"reasoning_tokens": 4}
    body["stream_options"] = {"continuous_usage_stats": True}
    assert all("usage" not in one for one in server.events("/v1/chat/completions", **body))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"messages": []}, "the conversation is empty"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "text only"),
        ({"tool_choice": "required"}, "tool_choice needs tools"),
        ({"tool_choice": "must", "tools": TOOLS}, "tool_choice must be 'auto', 'none', 'required' or"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "a"}}, "tools": TOOLS},
            "names 'a'; the tools are weat",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}, "strict": True}}},
            'Unimplemented keys: ["not"]',
        ),
        ({"modalities": ["text", "audio"]}, "text only"),
        ({"functions": [{}]}, "give tools"),
        ({"top_logprobs": 2}, "top_logprobs needs logprobs"),
        ({"chat_template": "{{ raise_exception('no') }}"}, "the chat template that was given failed"),
    ],
)
def test_what_is_not_possible_is_said(server: Any, given: dict[str, Any], words: str) -> None:
    assert words in server.refused("/v1/chat/completions", **({"messages": HELLO} | given))


def test_forms_and_calls_that_are_enforced(serve: Any, llm: LLM) -> None:
    """A random model calls what it must, thinks as long as it likes, and then answers in the form that it must."""
    unit = {"type": "object", "properties": {"unit": {"enum": ["C", "F"]}}, "required": ["unit"]}
    tools = [{"type": "function", "function": {"name": name, "parameters": unit}} for name in ("heat", "cold")]
    given = {"temperature": 1.0, "seed": 2, "max_tokens": 400, "n": 3}
    server = serve(llm, tool_call_parser="deepseek_v31")
    for choice, names in (
        ("required", {"heat", "cold"}),
        ({"type": "function", "function": {"name": "cold"}}, {"cold"}),
    ):
        more = {"tools": tools, "tool_choice": choice, "parallel_tool_calls": False}
        for one in server.chat(HELLO, **given, **more)["choices"]:
            (call,) = one["message"]["tool_calls"]
            assert call["function"]["name"] in names and one["finish_reason"] == "tool_calls"
            assert json.loads(call["function"]["arguments"])["unit"] in ("C", "F")
    thinks = serve(llm, reasoning_parser="deepseek_r1")
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": unit | {"additionalProperties": False}}}
    given |= {"response_format": form, "max_tokens": 40, "logit_bias": {"1": 6}}  # for the end token
    for one in thinks.chat(HELLO, **given)["choices"]:
        assert one["message"]["reasoning_content"] and not one["message"]["content"]
        assert one["finish_reason"] == "length", "the form comes after the thought, and nothing ends it before"
    thought = [*HELLO, {"role": "assistant", "content": "<think>Hm.</think>"}]
    more = {"add_generation_prompt": False, "continue_final_message": True}
    texts = [one["message"]["content"].strip() for one in thinks.chat(thought, **given, **more)["choices"]]
    assert all(text.startswith("{") for text in texts)


def test_templates(serve: Any, llm: LLM, tmp_path: Any) -> None:
    (tmp_path / "template").write_text("{{ messages[0].content }}{{ more }}")
    server = serve(llm, chat_template=str(tmp_path / "template"))
    text = "Hello, you"
    ids = llm.tokenizer.encode(text, add_special_tokens=False)
    assert server.answer("/tokenize", messages=HELLO, chat_template_kwargs={"more": ", you"})["tokens"] == ids
    answer = server.chat(HELLO, max_tokens=1, chat_template_kwargs={"more": ", you"}, return_token_ids=True)
    assert answer["prompt_token_ids"] == ids
    for path in ("/tokenize", "/v1/chat/completions"):
        assert "--trust-request-chat-template" in server.refused(path, messages=HELLO, chat_template="x")
    with pytest.raises(ValueError, match="chat_template is no template, and no file"):
        serve(llm, chat_template=str(tmp_path / "none"))
    with pytest.raises(ValueError, match="reasoning_parser must be one of"):
        serve(llm, reasoning_parser="clever")
