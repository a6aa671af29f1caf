"""Parameters and endpoints that clients of other servers use: efforts, lengths, order, the cache, the description."""

from __future__ import annotations

from typing import Any

import pytest

from dsa_engine import LLM

HELLO = [{"role": "user", "content": "Hello"}]
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
VARIABLES = "{{ thinking }} {{ enable_thinking }} {{ reasoning_effort }}"


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({}, "  "),
        ({"reasoning_effort": None}, "  "),
        ({"reasoning_effort": "high"}, "True True high"),
        ({"reasoning_effort": "none"}, "False False none"),
        ({"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False}}, " False low"),
        ({"thinking": {"type": "enabled"}}, "True True "),
        ({"enable_thinking": False, "reasoning_effort": "low"}, "False False low"),
    ],
)
def test_an_effort_asks_for_thoughts(server: Any, llm: LLM, given: dict[str, Any], text: str) -> None:
    ids = llm.tokenizer.encode(text, add_special_tokens=False)
    for path in ("/tokenize", CHAT):
        more = {} if path == "/tokenize" else {"max_tokens": 1, "return_token_ids": True}
        answer = server.answer(path, messages=HELLO, chat_template=VARIABLES, **given, **more)
        assert answer["tokens" if path == "/tokenize" else "prompt_token_ids"] == ids
    assert "reasoning_effort: " in server.refused(CHAT, messages=HELLO, reasoning_effort="extreme")


@pytest.mark.parametrize(
    "given",
    [
        {"thinking_token_budget": 5},
        {"custom_params": {"thinking_budget": 5}},
    ],
    ids=str,
)
def test_budgets_of_thoughts(server: Any, given: dict[str, Any]) -> None:
    """This model has no tokens for thoughts, so it keeps a budget of those that clients ask of any model."""
    assert "thinking_token_budget needs a tokenizer" in server.refused(CHAT, messages=HELLO, **given)
    server.chat(HELLO, thinking={"type": "enabled", "budget_tokens": 5}, max_tokens=1)


@pytest.mark.parametrize(
    ("given", "text"),
    [({"regex": "ab"}, "ab"), ({"ebnf": 'root ::= "ab"'}, "ab"), ({"json_schema": {"const": 5}}, "5")],
    ids=str,
)
def test_forms_by_other_names(server: Any, given: dict[str, Any], text: str) -> None:
    assert server.complete("x", max_tokens=9, **given)["choices"][0]["text"] == text
    assert "give one only" in server.refused(COMPLETIONS, prompt="x", guided_regex="c", **given)
    others: list[dict[str, Any]] = [{"stop_regex": "a"}, {"truncation_side": "right"}, {"separate_reasoning": False}]
    for other in (*others, {"guided_whitespace_pattern": " "}):
        assert f"{next(iter(other))} is not possible here" in server.refused(COMPLETIONS, prompt="x", **other)


def test_what_routers_and_browsers_ask(server: Any) -> None:
    """The name of a request is in its answer's id; facts and load; pages of the allowed origin."""
    given = {"headers": {"X-Request-Id": "mine-1", "Origin": "https://a.example"}}
    answer = server.post(CHAT, json={"messages": HELLO, "max_tokens": 1}, **given)
    assert answer.json()["id"] == "chatcmpl-mine-1"
    assert answer.headers["access-control-allow-origin"] == "https://a.example"
    for path in ("/server_info", "/get_server_info", "/model_info", "/get_model_info"):
        about = server.get(path).json()
        assert about["served_model_name"] == "demo" and about["context_length"] == 2048
    for path in ("/load", "/get_load"):
        assert server.get(path).json() == {
            "server_load": 0, "num_reqs": 0, "num_waiting_reqs": 0, "token_usage": pytest.approx(0, abs=1)
        }  # fmt: skip
    assert server.get("/is_sleeping").json() == {"is_sleeping": False} and server.get("/kv_event_sources").json() == []


def test_the_prompt_of_a_chat(server: Any) -> None:
    rendered = server.answer(f"{CHAT}/render", messages=HELLO)
    assert rendered["token_ids"] == server.answer("/tokenize", messages=HELLO)["tokens"]
    assert "messages" in server.refused(f"{CHAT}/render", messages=5)


def test_an_echo_in_a_stream(server: Any) -> None:
    whole = server.complete("Once", max_tokens=3, temperature=0, echo=True)["choices"][0]["text"]
    body = {"prompt": "Once", "max_tokens": 3, "temperature": 0, "echo": True, "stream": True}
    text = "".join(one["choices"][0]["text"] for one in server.events(COMPLETIONS, **body))
    assert text == whole and "Once" in whole


def test_the_last_tokens_of_a_prompt(server: Any, llm: LLM) -> None:
    ids = llm.tokenizer.encode("Once upon a time")
    given = {"max_tokens": 1, "return_token_ids": True}
    for prompt in ("Once upon a time", ids):
        (choice,) = server.complete(prompt, truncate_prompt_tokens=2, **given)["choices"]
        assert choice["prompt_token_ids"] == ids[-2:]
    (choice,) = server.complete(ids, truncate_prompt_tokens=2, echo=True, **given)["choices"]
    assert choice["text"].startswith(llm.tokenizer.decode(ids[-2:]))
    long = [5, *range(6, 100)] * 30
    (choice,) = server.complete(long, truncate_prompt_tokens=-1, **given)["choices"]
    assert choice["prompt_token_ids"] == long[-2047:]
    answer = server.chat(HELLO, truncate_prompt_tokens=3, **given)
    assert answer["prompt_token_ids"] == llm.tokenizer.encode(llm.conversation_format.render(HELLO), False)[-3:]
    assert "truncate_prompt_tokens must leave a token" in server.refused(
        COMPLETIONS, prompt=ids, truncate_prompt_tokens=0
    )


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_more_tokens_than_there_is_room_for(server: Any, name: str) -> None:
    """An error in a request that asks for them, as vLLM's server has it; what is only a default ends at the length."""
    path, prompt = (COMPLETIONS, {"prompt": [5] * 48}) if name == "max_tokens" else (CHAT, {"messages": HELLO})
    words = server.refused(path, **prompt, **{name: 2040 if name == "max_tokens" else 2048})
    assert words.startswith("This model's maximum context length is 2048 tokens") and f"{name} is 20" in words
    if name == "max_tokens":
        assert "48 tokens, 2088 in all" in words and "at most 2000" in words
        end = {"allowed_token_ids": [1]}
        assert server.complete([5] * 48, max_tokens=2000, **end)["choices"][0]["finish_reason"] == "stop"
        assert server.complete([5] * 2040, **end)["choices"][0]["finish_reason"] == "stop"


def test_a_priority_reaches_the_scheduler(server: Any, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    queue = llm.engine.queue
    monkeypatch.setattr(llm.engine, "queue", lambda add: (seen.append(add.priority), queue(add))[1])
    server.complete("a", max_tokens=1)
    server.complete("a", max_tokens=1, priority=-5)
    server.chat(HELLO, max_tokens=1, priority=7)
    assert seen == [0, -5, 7]
    assert "priority" in server.refused(COMPLETIONS, prompt="a", priority="high")


def test_resetting_the_prefix_cache(server: Any, llm: LLM) -> None:
    given = {"prompt": [7] * 300, "max_tokens": 1}
    cached = []
    for _ in range(2):
        server.complete(**given)
        cached.append(server.complete(**given)["usage"]["prompt_tokens_details"]["cached_tokens"])
        assert server.post("/reset_prefix_cache").status_code == 200
        cached.append(server.complete(**given)["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert cached[0] == cached[2] == 256 and cached[1] == cached[3] == 0


def test_the_description_of_the_api(server: Any) -> None:
    described = server.get("/openapi.json").json()
    assert described["openapi"].startswith("3.") and {CHAT, COMPLETIONS, "/tokenize"} <= described["paths"].keys()
    assert "reasoning_effort" in described["components"]["schemas"]["ChatRequest"]["properties"]
