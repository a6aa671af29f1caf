"""Requests that fail alone, and log-probabilities."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dsa_engine import LLM, SamplingParams
from dsa_engine.system.interrupts import uninterrupted
from dsa_engine.text.tokenizer import Tokenizer

TEXTS = ["first request", "the second", "a third one of them"]
GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)


@pytest.fixture(scope="module")
def shared(demo_cache: Path) -> LLM:
    return LLM("demo-random", device="cpu", max_model_len=2048, cache_memory="16MiB", page_size=8, progress=False)


def nan_for(llm: LLM, prompt: str, after: int, value: float) -> Callable[..., torch.Tensor]:
    """Replaces a logit of one request, after some tokens, by ``value``."""
    ids, original = llm.tokenizer.encode(prompt), llm.engine.runner.sampled_logits

    def spoiled(plan: Any, hidden: torch.Tensor) -> torch.Tensor:
        logits = original(plan, hidden)
        for row, (request, *_) in zip(logits, plan.own.wanted, strict=True):
            if list(request.prompt) == ids and len(request.output) == after:
                row[7] = value
        return logits

    return spoiled


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(
    "value, after, allowed",
    [
        (float("nan"), 4, None),
        (float("inf"), 0, None),
        (float("-inf"), 2, None),
        (float("nan"), 1, list(range(60, 200))),  # the logit of a forbidden token
    ],
)
def test_logits_that_are_not_finite_end_one_request(
    llm: LLM,
    monkeypatch: pytest.MonkeyPatch,
    value: float,
    after: int,
    allowed: list[int] | None,
    temperature: float,
) -> None:
    params = SamplingParams(temperature=temperature, max_tokens=10, ignore_eos=True, seed=1, allowed_token_ids=allowed)
    expected = llm.generate(TEXTS, params)
    monkeypatch.setattr(llm.engine.runner, "sampled_logits", nan_for(llm, TEXTS[1], after, value))
    first, second, third = llm.generate(TEXTS, params)
    assert (second.finish_reason, second.token_ids) == ("error", expected[1].token_ids[:after])
    assert second.error == "the model's logits for its next token are not finite (inf or nan)"
    assert second.text == llm.tokenizer.decode(second.token_ids)
    assert (second.metrics.ttft_s > 0) == (after > 0), "nan without a token"
    for output, wanted in ((first, expected[0]), (third, expected[2])):
        assert output.token_ids == wanted.token_ids and output.finish_reason == "length" and output.error is None
    pieces = list(llm.stream(TEXTS[1], params))
    assert (pieces[-1].finish_reason, pieces[-1].error) == ("error", second.error)
    assert [t for p in pieces for t in p.token_ids] == second.token_ids
    assert "".join(map(str, pieces)) == second.text


def test_a_request_that_forbids_every_token(llm: LLM) -> None:
    params = SamplingParams(max_tokens=10, min_tokens=3, stop_token_ids=list(range(320)))
    fine, failed = llm.generate(TEXTS[:2], [GREEDY, params])
    assert fine.finish_reason == "length" and failed.finish_reason == "error"
    assert failed.error == (
        "no token is left to sample: allowed_token_ids, bad_words, logit_bias, and min_tokens with its stop_token_ids, "
        "forbid every one, or those that structured_outputs allows"
    )


@pytest.mark.parametrize("at", [0, 3, 9])
def test_text_that_cannot_be_decoded_ends_one_request(llm: LLM, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """Text that is not streamed is decoded at the end: all tokens are there, but no text. A stream ends at once."""
    expected = llm.generate(TEXTS, GREEDY)
    bad, decode = expected[1].token_ids[at], Tokenizer.decode

    def failing(self: Tokenizer, ids: list[int], skip_special_tokens: bool = True) -> str:
        if bad in ids:
            raise UnicodeError("half a character")
        return decode(self, ids, skip_special_tokens)

    monkeypatch.setattr(Tokenizer, "decode", failing)
    outputs = llm.generate(TEXTS, GREEDY)
    assert outputs[1].finish_reason == "error"
    assert outputs[1].error == "its tokens could not be decoded to text: UnicodeError: half a character"
    assert outputs[1].token_ids == expected[1].token_ids and outputs[1].text == ""
    pieces = list(llm.stream(TEXTS[1], GREEDY))
    ids = [token for piece in pieces for token in piece.token_ids]
    assert pieces[-1].error == outputs[1].error
    assert ids == expected[1].token_ids[: expected[1].token_ids.index(bad) + 1]
    assert expected[1].text.startswith("".join(map(str, pieces)))
    others = [i for i in (0, 2) if bad not in expected[i].token_ids]
    assert others and all(outputs[i].text == expected[i].text for i in others)


def test_an_interrupt_waits_for_the_end_of_a_block() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), uninterrupted():
        with uninterrupted():
            signal.raise_signal(signal.SIGINT)
            done.append("inner")
        done.append("outer")
    assert done == ["inner", "outer"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_logprobs(llm: LLM) -> None:
    """They are those of the model's distribution, also if the token is chosen from another one."""
    params = SamplingParams(
        temperature=3.0, top_k=50, max_tokens=12, min_tokens=12, seed=3, logprobs=4, stop_token_ids=[70, 71, 72]
    )
    plain, output, sampled_only = llm.generate(
        [TEXTS[0]] * 3, [GREEDY, params, SamplingParams(max_tokens=5, logprobs=0, ignore_eos=True, seed=4)]
    )
    assert plain.logprobs is None and plain.cumulative_logprob is None
    ids = output.prompt_token_ids + output.token_ids
    expected = llm.prompt_logits(ids)[len(output.prompt_token_ids) - 1 : -1].log_softmax(dim=-1)
    assert output.logprobs is not None and len(output.logprobs) == 12
    for token, likely, row in zip(output.token_ids, output.logprobs, expected, strict=True):
        best = row.topk(4).indices.tolist()
        assert list(likely)[:4] == best and set(likely) == {*best, token}
        assert list(likely.values()) == pytest.approx(row[list(likely)].tolist(), abs=1e-4)
    assert any(len(likely) == 5 for likely in output.logprobs)
    chosen = [likely[token] for token, likely in zip(output.token_ids, output.logprobs, strict=True)]
    assert output.cumulative_logprob == pytest.approx(sum(chosen))
    assert sampled_only.logprobs is not None
    assert [list(likely) for likely in sampled_only.logprobs] == [[token] for token in sampled_only.token_ids]
    pieces = list(llm.stream(TEXTS[0], params))
    assert [list(likely) for piece in pieces for likely in piece.logprobs or []] == [list(f) for f in output.logprobs]


def test_logprobs_of_more_tokens_than_there_are(llm: LLM) -> None:
    output = llm.generate(TEXTS[0], SamplingParams(temperature=0, max_tokens=2, logprobs=1000))[0]
    assert output.logprobs is not None and [len(likely) for likely in output.logprobs] == [320] * len(output.token_ids)


def test_logprobs_end_with_the_tokens(llm: LLM) -> None:
    free = llm.generate(TEXTS[0], GREEDY)[0]
    params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, stop=[free.text[1]], logprobs=1)
    output = llm.generate(TEXTS[0], params)[0]
    assert output.logprobs is not None and len(output.logprobs) == len(output.token_ids) < 10


@pytest.mark.parametrize("batched", [8192, 7])
def test_prompt_logprobs(shared: LLM, batched: int) -> None:
    """Every prompt token but the first has the model's log-probability, rank and text, with the prompt in one chunk or
    several."""
    llm = shared
    if batched != 8192:
        llm = LLM("demo-random", device="cpu", max_model_len=256, max_num_batched_tokens=batched, progress=False)
    ask = SamplingParams(temperature=0.0, max_tokens=3, prompt_logprobs=2, logprobs=1, ignore_eos=True)
    several = SamplingParams(max_tokens=2, prompt_logprobs=0, n=2, seed=1, ignore_eos=True)
    first, second, plain, short = llm.generate([*TEXTS, [5]], [ask, several, GREEDY, ask])
    assert plain.prompt_logprobs is None and short.prompt_logprobs == [None]
    for output, count in ((first, 2), (second, 0)):
        assert output.prompt_logprobs is not None and output.prompt_logprobs[0] is None
        ids = output.prompt_token_ids
        rows = llm.prompt_logits(ids).log_softmax(dim=-1)
        assert len(output.prompt_logprobs) == len(ids)
        for token, likely, row in zip(ids[1:], output.prompt_logprobs[1:], rows, strict=False):
            assert likely is not None and set(likely) == {*row.topk(count).indices.tolist(), token}
            assert list(likely)[:count] == row.topk(count).indices.tolist()
            assert list(likely.values()) == pytest.approx(row[list(likely)].tolist(), abs=1e-4)
            for one, value in likely.items():
                assert value.logprob == float(value) and value.decoded_token == llm.tokenizer.token_text(one)
                assert value.rank == int((row > row[one]).sum()) + 1
    assert first.logprobs is not None and [of.rank for of in first.logprobs[0].values()] == [1]


def test_prompt_logprobs_after_a_preemption(demo_cache: Path) -> None:
    """Log-probabilities computed again are not returned twice."""
    llm = LLM("demo-random", device="cpu", max_model_len=512, cache_memory="0.5MiB", page_size=8, progress=False)
    prompts = [[7 + i] * 80 for i in range(3)]
    wanted = [llm.generate([prompt], SamplingParams(max_tokens=1, prompt_logprobs=0))[0] for prompt in prompts]
    params = SamplingParams(max_tokens=50, prompt_logprobs=0, ignore_eos=True)
    outputs = llm.generate(prompts, params)
    assert llm.engine.scheduler.preemptions > 0
    for output, alone in zip(outputs, wanted, strict=True):
        assert output.prompt_logprobs is not None and alone.prompt_logprobs is not None
        assert len(output.prompt_logprobs) == 80
        for one, other in zip(output.prompt_logprobs[1:], alone.prompt_logprobs[1:], strict=True):
            assert one is not None and one == pytest.approx(other, abs=1e-3)


def test_a_request_that_loses_its_pages_under_a_step_in_flight(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """It finds its full pages again and prefills one token, at once: the token of the step in flight is void."""
    prompts = [[*range(2, 34)], [*range(40, 76)]]
    params = SamplingParams(temperature=0.5, seed=3, max_tokens=24, ignore_eos=True)
    expected = [out.token_ids for out in llm.generate(prompts, params)]
    engine, step = llm.engine, llm.engine.step
    monkeypatch.setattr(engine, "async_scheduling", True)
    lengths = {41, 49, 57}  # tokens that are read; all but one are in full pages

    def preempting() -> Any:
        read = step()
        for request in engine.scheduler.decoding.requests[-1:]:
            if engine.in_flight and len(request) - 1 in lengths:
                lengths.remove(len(request) - 1)
                engine.scheduler.preempt(request)
        return read

    monkeypatch.setattr(engine, "step", preempting)
    assert [out.token_ids for out in llm.generate(prompts, params)] == expected
    assert not lengths


def test_a_command_does_not_wait_for_an_interrupted_step() -> None:
    """Ctrl-C in a step that never ends: an orderly end waits for it for 90 seconds."""
    program = """
import os, signal, threading
from dsa_engine import LLM
from dsa_engine.commands.arguments import run

def command():
    with LLM("demo", device="cpu", max_model_len=100) as llm:
        begun, never = threading.Event(), threading.Event()
        llm.engine.step = lambda: begun.set() or never.wait()
        threading.Thread(target=lambda: begun.wait() and os.kill(os.getpid(), signal.SIGINT)).start()
        llm.generate([[5, 6, 7]])

print("begins")
run(command)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=80)
    assert done.returncode == 130 and done.stderr.endswith("interrupted\n") and done.stdout == "begins\n"
