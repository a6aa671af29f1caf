"""Several tokens of a request in one step: same tokens as one by one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dsa_engine import LLM, SamplingParams
from dsa_engine.engine.calls.reply import Reply
from dsa_engine.engine.requests.limits import Add
from dsa_engine.engine.requests.request import Chunk, Request
from dsa_engine.engine.requests.samples import Samples, StepResult, ranked
from dsa_engine.engine.requests.scheduler import Step

PROMPTS = [[5, 6, 7, 8], [9, 30, 31, 32] * 11]  # the second is longer than its selection
GREEDY = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)


@pytest.fixture(scope="module")
def shared(demo_cache: Path) -> LLM:
    return LLM(
        "demo-random",
        dtype="float32",
        max_model_len=512,
        max_num_batched_tokens=16,
        max_prefill_share=1.0,
        cache_memory="8MiB",
        page_size=4,
        hf_overrides={"index_topk": 24},
        enforce_eager=True,
        enable_prefix_caching=False,  # the same prompts are computed again and again
        progress=False,
    )


def test_three_known_tokens_in_a_decode_step(llm: LLM) -> None:
    """The same choices and log-probabilities as in three steps: greedy, drawn, with min_tokens, and with penalties."""
    drawn = replace(GREEDY, temperature=1.1, top_p=0.9, seed=3, logprobs=2)
    allowed = [40, 41]  # other tokens end it, from the fourth on
    bound = replace(GREEDY, min_tokens=3, stop_token_ids=[i for i in range(320) if i not in allowed])
    penalised = replace(GREEDY, repetition_penalty=1.3, frequency_penalty=0.7, presence_penalty=-0.2, seed=4)
    shaped = replace(
        drawn, repetition_penalty=0.8, frequency_penalty=1.5, logit_bias={70: 2.0}, bad_words=["ab", "e", "the"]
    )
    params = [GREEDY, drawn, bound, penalised, shaped]
    cases = [(prompt, one) for prompt in PROMPTS for one in params]
    wanted = llm.generate([prompt for prompt, _ in cases], [one for _, one in cases])
    engine = llm.engine
    requests = [engine.add(prompt, one, llm.tokenizer) for prompt, one in cases]
    while min(len(request.output) for request in requests) < 1:
        engine.step()
    rows = [1] + [3] * 9
    for request, output, count in zip(requests, wanted, rows, strict=True):
        assert request.output == output.token_ids[:1]
        request.output += output.token_ids[1:count]
        engine.scheduler.ledger.take(request, 0, 1)  # for the new tokens
    chunks = [
        Chunk(request, request.num_computed_tokens, count, range(1), count)
        for request, count in zip(requests, rows, strict=True)
    ]
    read = engine.runner.launch(engine.runner.plan(Step(chunks))).read()
    for number, (request, output, count) in enumerate(zip(requests, wanted, rows, strict=True)):
        tokens = read.tokens[number, :count].tolist()
        assert tokens == output.token_ids[1 : 1 + count]
        if output.logprobs is not None and request.params.logprobs is not None:
            rows = read.logprobs_of(np.array([number]))[0]
            for token, row, logprobs in zip(tokens, rows.tolist(), output.logprobs[1:], strict=False):
                assert ranked(token, row, request.params.logprobs) == pytest.approx(logprobs, abs=1e-3)
        engine.finish(request, "abort")
    for output in wanted[2::5]:
        assert set(output.token_ids[:3]) <= set(allowed) and output.token_ids[3] not in allowed


def three_a_step(llm: LLM, codes: dict[int, list[int]]) -> Any:
    """Replaces a runner's launch: samples three tokens of each request from a list, found by its first prompt token."""

    def launch(plan: Any, _: Any) -> StepResult:
        requests, tokens = [request for request, *_ in plan.own.wanted], list[int]()
        for request in requests:
            first = len(request) - len(request.prompt)
            tokens += codes[request.prompt[0]][first : first + 3]
        samples, of_all = Samples.of(requests, [0] * len(requests), [3] * len(requests), 1), torch.tensor(tokens)
        return StepResult(samples, of_all, lambda: of_all)

    return launch


@pytest.mark.parametrize("ahead", [False, True])
def test_several_tokens_are_cut_at_the_first_ending(llm: LLM, monkeypatch: pytest.MonkeyPatch, ahead: bool) -> None:
    eos = llm.engine.config.eos_token_ids[0]
    plain = list(range(70, 90))
    text = llm.tokenizer.decode(plain[:12])
    with_eos = [*plain[:4], eos, *plain[5:]]
    params: list[tuple[list[int], SamplingParams, int, str]] = [
        (plain, SamplingParams(max_tokens=4), 4, "length"),
        (plain, SamplingParams(max_tokens=12, stop_token_ids=[74]), 5, "stop"),
        (plain, SamplingParams(max_tokens=12, stop_token_ids=[71, 77], min_tokens=5), 8, "stop"),
        (with_eos, SamplingParams(max_tokens=12), 5, "stop"),
        (with_eos, SamplingParams(max_tokens=12, ignore_eos=True), 12, "length"),
        (plain, SamplingParams(max_tokens=12, stop=text[6:8]), 8, "stop"),
        ([*plain[:4], -1, *plain[5:]], SamplingParams(max_tokens=12), 4, "error"),
        ([*plain[:4], -1, *plain[5:]], SamplingParams(max_tokens=12, stop_token_ids=[72]), 3, "stop"),
    ]
    codes = {10 + i: of for i, (of, *_) in enumerate(params)}
    monkeypatch.setattr(llm.engine.runner, "launch", three_a_step(llm, codes))
    monkeypatch.setattr(llm.engine, "async_scheduling", ahead)
    outputs = llm.generate([[number] for number in codes], [one for _, one, _, _ in params])
    for output, (tokens, _, count, reason) in zip(outputs, params, strict=True):
        assert (output.token_ids, output.finish_reason) == (tokens[:count], reason)
    assert [o.error is not None for o in outputs] == [False] * 6 + [True, False]
    assert outputs[5].text == text[:6] and outputs[6].text == text[:4]
    pieces = list(llm.stream([11], params[1][1]))
    assert [piece.token_ids for piece in pieces] == [plain[:3], plain[3:5]]
    assert [piece.finish_reason for piece in pieces] == [None, "stop"]


class Letters:
    """A tokenizer with a letter for each token, which fails at token 9."""

    joins_bytes = True

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        if 9 in ids:
            raise ValueError("no letter")
        return "".join("abcdefgh"[i] for i in ids)


@pytest.mark.parametrize(
    ("interval", "steps", "pieces"),
    [
        (1, [1, 1, 1], [1, 1, 1]),
        (3, [1, 1, 1, 1, 1, 1], [1, 3, 2]),  # the first token at once, and what is there at the end
        (3, [2, 2, 2, 1], [2, 4, 1]),  # drafts: a step's tokens stay together
        (100, [1, 1, 1], [1, 2]),
    ],
)
def test_pieces_of_a_stream(interval: int, steps: list[int], pieces: list[int]) -> None:
    params, given = SamplingParams(max_tokens=sum(steps), ignore_eos=True), list[Any]()
    reply = Reply(Add([5], params), Letters(), given.append, interval)  # type: ignore[arg-type]
    request = Request(0, [5], params)
    for count in steps:
        sampled = [1] * count
        endings = [request.append(token, ()) for token in sampled]
        reply.take(sampled, 0.0, endings[-1])
    assert [len(piece.token_ids) for piece in given] == pieces
    assert [piece.finish_reason for piece in given] == [None] * (len(pieces) - 1) + ["length"]
