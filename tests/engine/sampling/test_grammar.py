"""Outputs with a form: they have it, whatever the model says, and the requests beside them do not change."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from dsa_engine import LLM, SamplingParams
from dsa_engine.config.grammar_check import GrammarCheck
from dsa_engine.config.structured_outputs import lark_grammar
from dsa_engine.engine.requests.decoding import Decoding
from dsa_engine.engine.requests.request import Request
from dsa_engine.engine.sampling.grammar import GrammarMasks
from dsa_engine.engine.steps.graphs import DecodeGraphs
from dsa_engine.sampling_params import StructuredOutputsParams

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "maximum": 99}, "b": {"enum": ["x", "yy"]}, "s": {"type": "string"}},
    "required": ["a", "b", "s"],
    "additionalProperties": False,
}
SCHEMA["properties"]["s"]["maxLength"] = 6  # type: ignore[index]
GRAMMAR = 'start: "<" WORD ("," WORD)* ">"\nWORD: /[a-f]{2,5}/'
FORMS: dict[str, tuple[dict[str, Any], str]] = {  # and what matches the output
    "json": (
        {"json": SCHEMA},
        r'\{\s*"a"\s*:\s*-?\d+\s*,\s*"b"\s*:\s*"(x|yy)"\s*,\s*"s"\s*:\s*"[^"]*(\\"[^"]*)*"\s*\}',
    ),
    "compact": (
        {"json": json.dumps(SCHEMA), "disable_any_whitespace": True},
        r'\{"a":-?\d+,"b":"(x|yy)","s":"[^"]*(\\"[^"]*)*"\}',
    ),
    "regex": ({"regex": r"\d{3}-[a-f]{0,9}/x"}, r"\d{3}-[a-f]{0,9}/x"),
    "choice": ({"choice": ["yes", "no", 'a "third"\n']}, 'yes|no|a "third"\n'),
    "grammar": ({"grammar": GRAMMAR}, r"<[a-f]{2,5}(,[a-f]{2,5})*>"),
    "gbnf": ({"grammar": 'root ::= "q" digit digit | "r"\ndigit ::= [0-9]'}, r"q\d\d|r"),
}
DRAWN = SamplingParams(temperature=1.2, max_tokens=90)
OPTIONS: dict[str, Any] = {"device": "cpu", "max_model_len": 512, "page_size": 8, "progress": False}


def params(count: int, **more: Any) -> list[SamplingParams]:
    """Parameters of requests with each form and with none, drawn, greedy and with penalties."""
    forms = [*(StructuredOutputsParams(**form) for form, _ in FORMS.values()), None]
    kinds = [
        {},
        {"temperature": 0.0},
        {"repetition_penalty": 1.3, "presence_penalty": 0.5},
        {"top_k": 40, "top_p": 0.9},
    ]
    return [
        replace(DRAWN, seed=i, structured_outputs=forms[i % len(forms)], **kinds[i % len(kinds)] | more)
        for i in range(count)
    ]


def outputs(llm: LLM, requests: list[SamplingParams]) -> list[Any]:
    prompts = [list(range(5 + i, 40 + 3 * i)) for i in range(len(requests))]
    return [one.outputs[0] for one in llm.generate(prompts, requests, use_tqdm=False)]


def check_forms(results: list[Any]) -> None:
    """Each output has the form of its number, or is cut off; most are whole."""
    whole = 0
    for i, output in enumerate(results):
        assert output.error is None
        form = [*FORMS.values(), (None, "(?s:.*)")][i % (len(FORMS) + 1)]
        if output.finish_reason == "stop":
            assert re.fullmatch(form[1], output.text), output.text
            whole += form[0] is not None
    assert whole > len(results) / 2


@pytest.fixture(scope="module")
def plain() -> Iterator[list[Any]]:
    """The outputs of an engine without drafts, whose cache is large."""
    with LLM("demo-random", **OPTIONS, cache_memory="64MiB") as llm:
        yield outputs(llm, params(14))


def test_outputs_have_their_form(plain: list[Any]) -> None:
    check_forms(plain)


def test_requests_without_a_form_do_not_change(plain: list[Any]) -> None:
    with LLM("demo-random", **OPTIONS, cache_memory="64MiB") as llm:
        alone = outputs(llm, [replace(one, structured_outputs=None) for one in params(14)])
        again = outputs(llm, params(14))
    assert [one.token_ids for one in alone[6::7]] == [one.token_ids for one in plain[6::7]]
    assert [one.token_ids for one in again] == [one.token_ids for one in plain], "with pages that are found"
    assert all(one.metrics.num_cached_tokens > 0 for one in again)


@pytest.mark.parametrize("ahead", [False, True])
def test_launched_ahead_and_after_a_preemption(plain: list[Any], ahead: bool) -> None:
    """A step may be launched before the token is read on which its masks depend; a matcher follows from the output."""
    # Pages for two of the longest requests, of the 14.
    with LLM("demo-random", **OPTIONS, cache_memory="320KiB") as llm:
        engine, begun = llm.engine, llm.engine.launched_ahead
        engine.async_scheduling = ahead
        small = outputs(llm, params(14))
        assert engine.scheduler.preemptions > 2
        assert (engine.launched_ahead > begun) == ahead
        assert [one.token_ids for one in small] == [one.token_ids for one in plain]


@pytest.mark.parametrize("padded", [False, True], ids=["eager", "as a graph"])
@pytest.mark.parametrize("cache", ["64MiB", "400KiB"])
def test_drafts(plain: list[Any], padded: bool, cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts that are right, that the grammar refuses, and that it allows but the model does not choose."""
    right: dict[int, list[int]] = {i: one.token_ids for i, one in enumerate(plain)}
    taken, accepted = Decoding._taken, []

    def with_script(self: Decoding, *given: Any) -> Any:
        result = taken(self, *given)
        request: Request = result.request
        done = len(request.output) + len(result.tokens)
        tokens = right[request.id][done : done + len(request.drafts)]
        wrong = (request.id + done) % 5  # number of the first wrong draft
        request.drafts[: len(tokens)] = [t if j < wrong else (t + done) % 250 for j, t in enumerate(tokens)]
        accepted.append(None if result.draft_result is None else result.draft_result.accepted)
        return result

    monkeypatch.setattr(Decoding, "_taken", with_script)
    drafts = {"num_speculative_tokens": 3}
    with LLM("demo-random", **OPTIONS, cache_memory=cache, speculative_config=drafts) as llm:
        if padded:
            engine = llm.engine
            engine.runner.graphs = DecodeGraphs(engine.model, engine.cache, capture=False)
        results = outputs(llm, params(14))
        assert (llm.engine.scheduler.preemptions > 0) == (cache != "64MiB")
    check_forms(results)
    assert [one.token_ids for one in results] == [one.token_ids for one in plain]
    assert {0, 1, 2, 3} <= set(accepted)


def test_drafts_of_the_module_ahead_for_others_only() -> None:
    """A step is launched ahead of drafts as long as no request in it has a grammar."""
    with LLM("demo-random", **OPTIONS, cache_memory="64MiB", speculative_config={"num_speculative_tokens": 2}) as llm:
        engine = llm.engine
        engine.set_num_drafts(2)
        engine.runner.graphs = DecodeGraphs(engine.model, engine.cache, capture=False)
        engine.async_scheduling = True
        (free,) = outputs(llm, [replace(DRAWN, seed=1)])
        assert engine.launched_ahead > 10 and free.finish_reason in ("stop", "length")
        begun = engine.launched_ahead
        (formed,) = outputs(llm, [replace(DRAWN, seed=1, structured_outputs={"regex": "[a-z]{60}"})])
        assert engine.launched_ahead == begun and re.fullmatch("[a-z]{60}", formed.text)


def test_what_ends_a_request(plain: list[Any]) -> None:
    """A whole grammar is followed by the end token; a form that other parameters contradict is that request's error."""
    with LLM("demo-random", **OPTIONS, cache_memory="64MiB") as llm:
        formed = {"temperature": 0.0, "max_tokens": 99, "structured_outputs": {"choice": ["12"]}}
        several = [
            SamplingParams(**formed),
            SamplingParams(**formed | {"bad_words": ["1"], "logit_bias": {1: -100.0}}),
            SamplingParams(**formed | {"stop": ["1"]}),
            SamplingParams(**formed | {"temperature": 1.0, "n": 2, "seed": 3}),
        ]
        first, second, third, fourth = llm.generate([[5, 6]] * 4, several, use_tqdm=False)
        assert (first.text, first.finish_reason, first.token_ids[-1]) == ("12", "stop", 1)
        assert (second.text, second.finish_reason) == ("", "error") and "structured_outputs" in str(second.error)
        assert (third.text, third.finish_reason) == ("", "stop")
        assert [one.text for one in fourth.outputs] == ["12", "12"]


CHAIN = {"$ref": "#/$defs/0", "$defs": {str(i): {"$ref": f"#/$defs/{i + 1}"} for i in range(3500)} | {"3500": {}}}


@pytest.mark.parametrize(
    "form, words",
    [
        ({"json": {"type": "strin"}}, "json in structured_outputs is not possible: Invalid type: strin"),
        ({"json": {"uniqueItems": True}}, "uniqueItems"),
        ({"json": {"$ref": "#/$defs/none"}}, "/[$]defs/none"),
        ({"json": {"$ref": "http://127.0.0.1:1/schema"}}, "does not fetch"),
        ({"json": "{"}, "json in structured_outputs is not possible: .*EOF"),
        ({"json": '{"items":' * 3000 + "{}" + "}" * 3000}, "recursion limit"),
        # What would end the process, or hold it for seconds.
        ({"json": CHAIN}, "nested too deep"),
        ({"json": {"type": "integer", "multipleOf": 999983}}, "cannot be compiled within 2 s"),
        ({"json": {"allOf": [{"type": "string", "pattern": f"a.*{i}.*b"} for i in range(60)]}}, "cannot be compiled"),
        ({"json": {"allOf": [{"multipleOf": one, "type": "integer"} for one in (9973, 9967, 9949)]}}, "fuel exhausted"),
        ({"grammar": "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(5000)) + 'r5000: "a"'}, "nested too"),
        ({"grammar": "root ::= " + "(" * 500 + '"a"' + ")" * 500}, "nested too deep|at most|not possible"),
        ({"json": {"description": "x" * 2**17}}, "131.*characters, of at most 131072"),
        ({"regex": "("}, "unclosed group"),
        ({"regex": "(?=a)b"}, "look-ahead"),
        ({"grammar": 'start: other "a"'}, "unknown name"),
        ({"grammar": "not a grammar"}, "Lark's syntax has a rule start"),
        ({"choice": ["a"] * 30_000}, "150000 characters, of at most 131072"),
        ({"choice": []}, "choice must be a list .*that is not empty"),
        ({"choice": ["a", ""]}, "choice must be"),
        ({"json": {}, "regex": "a"}, "takes one of json, .*, not json and regex"),
        ({"disable_any_whitespace": True}, "takes one of json, .*, not none"),
        ({"jsn": {}}, "did you mean 'json'"),
        ({5: 1}, "must be StructuredOutputsParams or a dictionary"),
    ],
)
def test_impossible_forms(llm: LLM, form: Any, words: str) -> None:
    with pytest.raises((ValueError, TypeError), match=words):
        llm.generate([5], SamplingParams(structured_outputs=form), use_tqdm=False)


def test_what_a_check_ends_is_that_grammar_s_error() -> None:
    """Also if the process that checks is killed: the next grammar has another."""
    check = GrammarCheck()
    assert check.refusal(lark_grammar(GRAMMAR)) == ""
    assert check._process is not None
    check._process.kill()
    check._process.wait()
    assert "cannot be compiled" in check.refusal(lark_grammar(GRAMMAR))
    assert check.refusal(lark_grammar(GRAMMAR)) == ""
    assert "unknown name" in check.refusal(lark_grammar("start: other"))
    check._end()


def test_no_step_waits_for_a_grammar_that_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two requests that wait for it, one is aborted; those that come when it is compiled need not wait."""
    go, compiles = threading.Event(), GrammarMasks._compile

    def compile_late(self: GrammarMasks, source: str) -> Any:
        assert go.wait(60.0)
        return compiles(self, source)

    monkeypatch.setattr(GrammarMasks, "_compile", compile_late)
    formed = replace(DRAWN, seed=1, structured_outputs={"regex": "[a-z]{9}"})

    async def run(llm: LLM) -> None:
        waiting = [asyncio.create_task(llm.agenerate([5, number], formed)) for number in (6, 7)]
        (other,) = await asyncio.wait_for(llm.agenerate([5, 6, 7], replace(DRAWN, seed=2)), 60.0)
        assert other.outputs[0].finish_reason in ("stop", "length")
        assert not any(one.done() for one in waiting)
        waiting[1].cancel()
        await asyncio.wait(waiting[1:])
        (_,) = await asyncio.wait_for(llm.agenerate([5, 6, 7], replace(DRAWN, seed=2)), 60.0)
        go.set()
        (first,) = await waiting[0]
        (second,) = await llm.agenerate([5, 6], formed)
        assert re.fullmatch("[a-z]{9}", first.outputs[0].text) and second.outputs[0].text == first.outputs[0].text

    with LLM("demo-random", **OPTIONS, cache_memory="64MiB") as llm:
        asyncio.run(run(llm))
        assert not llm.loop._compiling


def test_compiled_grammars_are_few(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request keeps its own, however many others come meanwhile."""
    grammars, compiles, compiled = llm.engine.runner.grammars, GrammarMasks._compile, list[str]()
    assert grammars is not None
    monkeypatch.setattr(GrammarMasks, "_compile", lambda self, of: compiled.append(of) or compiles(self, of))
    forms = [{"regex": f"[a-z]{{{2 + number}}}"} for number in range(40)] * 2
    prompts = [[5, number] for number in range(80)]
    given = [SamplingParams(max_tokens=50, structured_outputs=form) for form in forms]
    for one, form in zip(llm.generate(prompts, given, use_tqdm=False), forms):
        assert re.fullmatch(form["regex"], one.text)
    assert grammars.compiled.cache_info().currsize == 32
    assert len(compiled) <= len(forms)


@pytest.mark.parametrize("other", [{"min_tokens": 2}, {"ignore_eos": True}])
def test_a_form_says_where_it_ends(other: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="leave min_tokens and ignore_eos out"):
        SamplingParams(structured_outputs={"json_object": True}, **other)


def test_an_object(llm: LLM) -> None:
    """Any JSON object, with a bias for what closes it."""
    closing = {llm.tokenizer.encode(text, add_special_tokens=False)[0]: 6.0 for text in ('"', "}", ",", ":")}
    given = SamplingParams(temperature=1.0, max_tokens=200, seed=4, logit_bias=closing, n=8)
    given.structured_outputs = StructuredOutputsParams(json_object=True)
    (result,) = llm.generate([[5]], given, use_tqdm=False)
    whole = [one.text for one in result.outputs if one.finish_reason == "stop"]
    assert len(whole) > 2 and all(isinstance(json.loads(text), dict) for text in whole)


@pytest.mark.parametrize("kind", ["choice", "json", "regex"])
@pytest.mark.parametrize("text", ["a<|User|>b", "a<|end_of_sentence|>b"])
def test_a_form_with_the_text_of_a_token(llm: LLM, kind: str, text: str) -> None:
    """It is spelled by other tokens: that one would be no text, or the end."""
    form = {"choice": [text], "json": {"enum": [text]}, "regex": re.escape(text)}[kind]
    given = SamplingParams(max_tokens=40, skip_special_tokens=False, structured_outputs={kind: form})
    ((one,),) = (result.outputs for result in llm.generate([[5]], given, use_tqdm=False))
    assert one.text.strip('"').removesuffix("<|end_of_sentence|>") == text and one.finish_reason == "stop"


def test_special_tokens_are_not_the_text_of_a_form(llm: LLM, random_ids: Callable[..., list[int]]) -> None:
    """A special token in a text would vanish from it."""
    (result,) = llm.generate(
        [[5]],
        SamplingParams(
            temperature=0.0,
            max_tokens=30,
            logit_bias={0: 100.0, 2: 100.0, 3: 100.0},
            structured_outputs={"regex": r"[\s\S]{12}"},
        ),
        use_tqdm=False,
    )
    assert len(result.text) == 12 and not {0, 2, 3} & {*result.token_ids}
