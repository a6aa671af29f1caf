"""/v1/completions: every parameter, and the tokens of ``LLM.generate``."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dsa_engine import LLM, SamplingParams

LONG = [(7 * i) % 300 + 4 for i in range(400)]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "given",
    [
        {"temperature": 0},
        {"temperature": 0.9, "seed": 7, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "n": 3},
        {"temperature": 1, "seed": 3, "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2},
        {"temperature": 0, "stop": ["e", "a"], "include_stop_str_in_output": True},
        {"temperature": 0, "logit_bias": {"70": 100}, "min_tokens": 3, "bad_words": ["qu"]},
        {"temperature": 0, "stop_token_ids": list(range(100, 300)), "skip_special_tokens": False},
        {"temperature": 0, "allowed_token_ids": [70, 71, 1], "ignore_eos": True, "logprobs": 2},
    ],
)
def test_outputs_are_those_of_generate(server: Any, llm: LLM, given: dict[str, Any], stream: bool) -> None:
    prompts: list[Any] = ["Once upon a time", [5, 6, 7, 8], LONG]
    same = {k: {int(t): b for t, b in v.items()} if k == "logit_bias" else v for k, v in given.items()}
    wanted = [
        output
        for one in llm.generate(prompts, SamplingParams(**(llm.default_sampling | same)))
        for output in one.outputs
    ]
    body = {"prompt": prompts, "stream": stream, "return_token_ids": True, **given}
    answers = server.events("/v1/completions", **body) if stream else [server.answer("/v1/completions", **body)]
    for index, output in enumerate(wanted):
        choices = [choice for one in answers for choice in one["choices"] if choice["index"] == index]
        assert "".join(choice["text"] for choice in choices) == output.text
        assert [token for choice in choices for token in choice["token_ids"]] == output.token_ids
        assert (choices[-1]["finish_reason"], choices[-1]["stop_reason"]) == (output.finish_reason, output.stop_reason)
        if output.logprobs is not None:
            values = [value for choice in choices for value in choice["logprobs"]["token_logprobs"]]
            best = [max(one.values()) for choice in choices for one in choice["logprobs"]["top_logprobs"]]
            assert values == pytest.approx([one[t] for one, t in zip(output.logprobs, output.token_ids)], abs=1e-4)
            assert best == pytest.approx([max(one.values()) for one in output.logprobs], abs=1e-4)


def test_usage_and_cached_tokens(server: Any) -> None:
    first = server.complete(LONG, max_tokens=5, ignore_eos=True, cache_salt="mine")
    again = server.complete(LONG, max_tokens=5, ignore_eos=True, cache_salt="mine")
    other = server.complete(LONG, max_tokens=5, ignore_eos=True, cache_salt="yours")
    usage = {"prompt_tokens": 400, "completion_tokens": 5, "total_tokens": 405}
    assert [one["usage"] for one in (first, again, other)] == [
        usage | {"prompt_tokens_details": {"cached_tokens": cached}} for cached in (0, 384, 0)
    ]
    body = {"prompt": LONG, "max_tokens": 5, "ignore_eos": True, "cache_salt": "mine", "stream": True}
    last = server.events("/v1/completions", **body, stream_options={"include_usage": True})[-1]
    assert (last["choices"], last["usage"]) == ([], again["usage"])
    every = {"include_usage": True, "continuous_usage_stats": True}
    counted = server.events("/v1/completions", **body, stream_options=every)
    counts = [one["usage"]["completion_tokens"] for one in counted]
    assert counts == sorted(counts) and counts[-1] == 5
    assert all("usage" not in one for one in server.events("/v1/completions", **body))


def test_characters_of_several_tokens(server: Any) -> None:
    """Bytes, texts and offsets of the tokens add up to the text, in a whole answer and in a stream."""
    wanted = "é🙂漢 x"
    given: dict[str, Any] = {"temperature": 0, "structured_outputs": {"choice": [wanted]}, "max_tokens": 40}
    chat = server.chat([{"role": "user", "content": "x"}], **given, logprobs=True)["choices"][0]
    every = b"".join(bytes(entry["bytes"]) for entry in chat["logprobs"]["content"])
    assert every.startswith(wanted.encode()) and len(chat["logprobs"]["content"]) > len(wanted)
    streamed = server.events("/v1/completions", prompt="x", logprobs=1, stream=True, **given)
    chunks = [one["choices"][0]["logprobs"] for one in streamed]
    tokens, offsets = ([one for chunk in chunks if chunk for one in chunk[name]] for name in ("tokens", "text_offset"))
    assert "".join(tokens).startswith(wanted)
    assert offsets == [sum(map(len, tokens[:i])) for i in range(len(tokens))]


def test_echo_and_prompt_logprobs(server: Any, llm: LLM) -> None:
    """As evaluations ask for the probability of a text: echo, logprobs and no output."""
    ids = llm.tokenizer.encode("Once upon a time")
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1, logprobs=1)
    (wanted,) = llm.generate(["Once upon a time"], params)
    assert wanted.prompt_logprobs is not None
    for prompt in ("Once upon a time", ids):
        answer = server.complete(prompt, max_tokens=0, echo=True, logprobs=1, temperature=0)
        (choice,) = answer["choices"]
        values = choice["logprobs"]["token_logprobs"]
        assert values[0] is None and len(values) == len(ids)
        expected = [one[token] for one, token in zip(wanted.prompt_logprobs[1:], ids[1:]) if one]
        assert values[1:] == pytest.approx(expected, abs=1e-4)
        assert choice["text"].endswith("Once upon a time")
    choice = server.complete("Once upon a time", max_tokens=1, echo=True, logprobs=0, temperature=0)["choices"][0]
    assert choice["text"] == "Once upon a time" + wanted.text and len(choice["logprobs"]["tokens"]) == len(ids) + 1
    choice = server.complete("Once", max_tokens=1, prompt_logprobs=2)["choices"][0]
    assert [one and max(one.values(), key=lambda of: of["logprob"])["rank"] for one in choice["prompt_logprobs"]] == [
        None,
        *[1] * (len(llm.tokenizer.encode("Once")) - 1),
    ]


def test_tokens_as_token_ids(server: Any) -> None:
    """Also of a prompt, and among the most likely ones; bytes and offsets stay those of the text."""
    given = {"max_tokens": 3, "temperature": 0, "return_token_ids": True, "return_tokens_as_token_ids": True}
    choice = server.complete("Once", echo=True, logprobs=2, **given)["choices"][0]
    ids = [f"token_id:{token}" for token in choice["prompt_token_ids"] + choice["token_ids"]]
    assert choice["logprobs"]["tokens"] == ids and len(choice["logprobs"]["top_logprobs"][-1]) in (2, 3)
    assert ids[-1] in choice["logprobs"]["top_logprobs"][-1] and choice["logprobs"]["text_offset"][0] == 0
    streamed = server.events("/v1/completions", prompt="Once", logprobs=0, stream=True, **given)
    assert [one for chunk in streamed for one in chunk["choices"][0]["logprobs"]["tokens"]] == ids[-3:]
    choice = server.chat([{"role": "user", "content": "x"}], logprobs=True, top_logprobs=1, **given)["choices"][0]
    entries, ids = choice["logprobs"]["content"], [f"token_id:{token}" for token in choice["token_ids"]]
    assert [one["token"] for one in entries] == [one["top_logprobs"][0]["token"] for one in entries] == ids
    assert b"".join(bytes(one["bytes"]) for one in entries).decode(errors="replace") == choice["message"]["content"]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, "prompt is empty"),
        ({"prompt": [5, "a"]}, "'a'"),
        ({"prompt": [5, 10**9]}, "token id 1000000000 is out of range"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens must be"),
        ({"prompt": ["a"] * 1000, "n": 1000}, "n is 1000, for each of 1000 prompts, and a request has at most 512"),
        ({"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias must be"),
        ({"prompt": "a", "stream_options": {"include_usage": True}}, "stream_options need stream"),
        ({"prompt": "a", "stream": True, "echo": True, "logprobs": 1}, "logprobs is not streamed"),
        ({"prompt": "a", "stream": True, "prompt_logprobs": 1}, "prompt_logprobs are not streamed"),
        ({"prompt": "a", "stop": "b", "selection": 1}, "leave out stream and stop"),
        ({"prompt": ["a"] * 9, "selection": 2}, "selection asks for 18 tokens in all, of at most 16"),
        ({"prompt": "a", "best_of": 2}, "use n, and choose"),
        ({"prompt": "a", "suffix": "b"}, "text is only continued"),
        ({"prompt": "a", "response_format": {"type": "json_schema", "json_schema": {}}}, "response_format needs"),
        ({"prompt": "a", "guided_json": {"type": "none"}}, "json in structured_outputs is not possible: Invalid type"),
        ({"prompt": "a", "guided_regex": "a", "guided_choice": ["b"]}, "say the form of the output; give one only"),
        ({"prompt": "a", "structured_outputs": {"regx": "a"}}, "did you mean 'regex'"),
        ({"prompt": "a", "structured_outputs": {"regex": "a"}, "ignore_eos": True}, "leave min_tokens and ignore_eos"),
        ({"prompt": "\ud800"}, "half a surrogate pair"),
    ],
)
def test_what_is_not_possible_is_said(server: Any, body: dict[str, Any], words: str) -> None:
    headers = {"Content-Type": "application/json"}
    response = server.post("/v1/completions", content=json.dumps(body), headers=headers)
    assert response.status_code == 400 and words in response.json()["error"]["message"], response.text


@pytest.mark.parametrize(
    "form",
    [
        {"guided_json": {"enum": ["yes", "no"]}},
        {"guided_json": '{"enum": ["yes", "no"]}'},
        {"guided_regex": '"(yes|no)"'},
        {"guided_choice": ['"yes"', '"no"']},
        {"guided_grammar": 'root ::= "\\"yes\\"" | "\\"no\\""'},
        {"structured_outputs": {"choice": ['"yes"', '"no"']}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": ["yes", "no"]}}}},
    ],
)
def test_the_form_of_the_output(server: Any, form: dict[str, Any]) -> None:
    choices = server.complete("a", n=3, seed=5, temperature=1.0, max_tokens=20, **form)["choices"]
    assert {choice["text"] for choice in choices} <= {'"yes"', '"no"'}
    assert {choice["finish_reason"] for choice in choices} == {"stop"}


def test_what_changes_nothing_is_accepted(server: Any) -> None:
    neutral: dict[str, Any] = {"best_of": 1, "suffix": "", "response_format": {"type": "text"}, "user": "me"}
    server.complete("a", max_tokens=1, temperature=None, stop=None, **neutral)


def test_unknown_parameters_are_ignored_and_named_once(server: Any, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        server.complete("a", max_tokens=1, temprature=0, no_stop_trim=False)
    lines = [record.getMessage() for record in caplog.records if "unknown parameter" in record.getMessage()]
    assert len(lines) == 2
    assert [line for line in lines if "did its client mean" in line] == [line for line in lines if "temprature" in line]


def test_names_of_the_model(server: Any) -> None:
    assert [one["id"] for one in server.get("/v1/models").json()["data"]] == ["demo", "other"]
    assert server.get("/v1/models/other").json()["max_model_len"] == 2048
    assert server.complete("a", max_tokens=1, model="other")["model"] == "other"
    assert "'gpt' is not here; there is demo, other" in server.refused("/v1/completions", 404, prompt="a", model="gpt")
    assert "model: " in server.refused("/v1/completions", prompt="a", model={})
    assert server.get("/v1/models/none").json()["error"]["code"] == "model_not_found"


def test_selection(server: Any, llm: LLM) -> None:
    """In both endpoints; the numbers are those of the Python API."""
    prompt = "key 4821 is 97\n" * 60
    params = SamplingParams(temperature=0, max_tokens=4, selection=3)
    (wanted,) = llm.generate([prompt], params)
    assert wanted.selection is not None
    choice = server.complete(prompt, temperature=0, max_tokens=4, selection=3)["choices"][0]
    assert choice["text"] == wanted.text
    for layer, of_layer in enumerate(choice["selection"]["positions"]):
        assert of_layer == wanted.selection.positions[layer].tolist()  # all of them: the prompt is long
        for token, weights in enumerate(choice["selection"]["weights"][layer]):
            assert weights == pytest.approx(wanted.selection.weights[layer, token], abs=1e-6)
    several = server.complete(["key", "key 4821 is"], temperature=0, max_tokens=2, selection=1)["choices"]
    for one, text in zip(several, ("key", "key 4821 is"), strict=True):
        assert (
            one["selection"]["positions"]
            == [[[*range(len(llm.tokenizer.encode(text)))]]] * llm.engine.config.num_hidden_layers
        )
    messages = [{"role": "user", "content": prompt}]
    answer = server.chat(messages, temperature=0, max_tokens=2, selection=1, return_token_ids=True)
    whole = llm.chat(messages, SamplingParams(temperature=0, max_tokens=2, selection=1))[0]
    assert whole.selection is not None and answer["prompt_token_ids"] == whole.prompt_token_ids
    assert answer["choices"][0]["selection"]["positions"] == whole.selection.positions.tolist()
    assert "selection" not in server.chat(messages, max_tokens=1)["choices"][0]


def test_tokenize_and_detokenize(server: Any, llm: LLM) -> None:
    ids = llm.tokenizer.encode("Once upon")
    answer = server.answer("/tokenize", prompt="Once upon", return_token_strs=True)
    assert (answer["tokens"], answer["count"], answer["max_model_len"]) == (ids, len(ids), 2048)
    assert "".join(answer["token_strs"]).endswith("OnceĠupon")
    bare = server.answer("/tokenize", prompt="Once upon", add_special_tokens=False)["tokens"]
    assert ids[-len(bare) :] == bare and len(bare) < len(ids)
    messages = [{"role": "user", "content": "Hello"}]
    text = llm.conversation_format.render(messages)
    ids = llm.tokenizer.encode(text, add_special_tokens=False)
    assert server.answer("/tokenize", messages=messages)["tokens"] == ids
    assert server.answer("/detokenize", tokens=bare)["prompt"] == "Once upon"
    assert server.answer("/detokenize", tokens=bare, return_token_strs=True)["token_strs"] == answer["token_strs"][1:]
    assert "vocabulary" in server.refused("/detokenize", tokens=[10**8])
    assert "tokens.0" in server.refused("/detokenize", tokens=["a"])
    assert "give prompt" in server.refused("/tokenize")
    about = server.get("/tokenizer_info").json()
    assert (about["eos_token"], about["chat_template"]) == (llm.tokenizer.hf.eos_token, llm.tokenizer.hf.chat_template)
