"""Padded steps with drafts as one function of device tensors, launched in turn and ahead: tokens and the module's
drafts are those of an engine that decodes token by token.

On a GPU such a step is a CUDA graph; here it runs kernel by kernel. Drafts are scripted, so that every number of drafts
is accepted at some time. The module's drafts are recorded, as its caches must be right too.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from dsa_engine import LLM, SamplingParams
from dsa_engine.engine.requests.request import Request
from dsa_engine.engine.requests.samples import StepResult
from dsa_engine.engine.sampling.chain import Parameters, draw
from dsa_engine.engine.speculation.passes import PassInputs
from dsa_engine.engine.steps.context_buckets import ContextBuckets
from dsa_engine.engine.steps.graphs import DecodeGraphs
from dsa_engine.engine.steps.plan import StepPlan
from oracles import SMALL as OPTIONS

GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
DRAWN = replace(GREEDY, temperature=1.0, seed=3)
PENALISED = replace(GREEDY, repetition_penalty=1.4, frequency_penalty=0.6, presence_penalty=0.3)
MODELS: dict[str, dict[str, Any]] = {
    "deepseek_v32": {"index_topk": 16},
    "glm_moe_dsa": {
        "index_topk": 16,
        "indexer_types": ["full", "shared", "full"],
        "index_share_for_mtp_iteration": True,
    },
    "deepseek_v3": {},
    "deepseek_v32 x3": {"index_topk": 16, "modules": 3},  # in vanilla mode
}


class Script:
    """Replaces the module's drafts on the device: of each request's, as many are right as its position says.

    Attributes:
        outputs: the right tokens, by request.
        made: the module's own drafts, by request and the position of the last token.
        keys: of the requests' random numbers.
    """

    def __init__(self, llm: LLM):
        self.outputs: dict[int, list[int]] = {}
        self.made: dict[tuple[int, int], list[int]] = {}
        self.keys: dict[int, int] = {}
        self._vocab = llm.engine.config.vocab_size
        self._requests: list[Request] = []
        drafter = llm.engine.runner.drafter
        assert drafter is not None
        self._made = drafter.passes.after_decode
        drafter.passes.after_decode = self.after_decode  # type: ignore[method-assign]
        llm.engine.runner.hooks.append(self.observe)

    def observe(self, step: StepPlan) -> None:
        self._requests = [chunk.request for chunk in step.own.chunks]
        self.keys |= {request.id: request.draw_key for request in self._requests}

    def after_decode(self, step: PassInputs, buffers: Any) -> torch.Tensor:
        drafts, rows = self._made(step, buffers), step.rows
        return self._scripted(drafts, (rows.first + step.accepted).where(rows.positions[:, 0] >= 0, -1))

    def _scripted(self, drafts: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        count = drafts.shape[1]
        for i, request in enumerate(self._requests):
            if positions[i] < 0:
                continue  # it has ended, in one step too many
            last = int(positions[i]) + 1
            limit = min(len(request.pages) * OPTIONS["page_size"], len(request.prompt) + request.max_tokens - 1)
            if (remaining := min(count, limit - 1 - last)) > 0:  # its last token is never drafted
                self.made[request.id, last] = drafts[i, :remaining].tolist()
            done = last + 1 - len(request.prompt)
            right = self.outputs.get(request.id, [])[done : done + count]
            num_right = random.Random(last * 1000 + request.id).randrange(count + 2)
            scripted = [token if j < num_right else (token + 1) % self._vocab for j, token in enumerate(right)]
            drafts[i, : len(scripted)] = torch.tensor(scripted, dtype=torch.int64)
        return drafts


def padded_llm(folder: Any, drafts: int, **options: Any) -> LLM:
    llm = LLM(folder, **OPTIONS | {"speculative_config": {"num_speculative_tokens": drafts}} | options)
    engine = llm.engine
    engine.set_num_drafts(drafts)
    engine.runner.graphs = DecodeGraphs(engine.model, engine.cache, capture=False, contexts=ContextBuckets(fewest=32))
    return llm


@pytest.fixture(
    scope="module",
    params=[
        "deepseek_v32",
        "deepseek_v32 x3",
        pytest.param("deepseek_v3", marks=pytest.mark.slow),
        pytest.param("glm_moe_dsa", marks=pytest.mark.slow),
    ],
)
def shared(request: Any, drafting_oracle: Callable[..., Any], random_ids: Callable[..., list[int]]) -> Any:
    """An engine with drafts, its script, an engine without drafts, and requests."""
    oracle = drafting_oracle(request.param.split()[0], **MODELS[request.param])
    llm, plain = padded_llm(oracle.folder, 3), LLM(oracle.folder, **OPTIONS)
    prompts = [random_ids(length, seed=length) for length in (1, 14, 17, 40)]
    return llm, Script(llm), plain, prompts, oracle


@pytest.fixture(params=[False, True], ids=["one after the other", "ahead"])
def engines(request: Any, shared: Any) -> Iterator[Any]:
    llm, script, *_ = shared
    engine, before = llm.engine, llm.engine.launched_ahead
    engine.async_scheduling = request.param
    script.outputs, script.made = {}, {}
    yield shared
    assert (engine.launched_ahead > before) == request.param
    assert not engine.scheduler.has_work
    assert engine.scheduler.free_pages == [engine.cache.pages]


def same(engines: Any, prompts: list[list[int]], params: list[SamplingParams]) -> list[Any]:
    """Runs requests with scripted drafts and without drafts; returns the outputs of the former."""
    llm, script, plain, *_ = engines
    for one in (llm, plain):
        one.loop.calls.ids = itertools.count(100)  # seeds of requests without one follow from it
    unended = [replace(p, max_tokens=30, ignore_eos=True, stop=None, stop_token_ids=None) for p in params]
    endless = plain.generate(prompts, unended)
    script.outputs = {100 + i: output.token_ids for i, output in enumerate(endless)}
    for one in (llm, plain):
        one.loop.calls.ids = itertools.count(100)
    actual, expected = (one.generate(prompts, params) for one in (llm, plain))
    for one, other in zip(actual, expected, strict=True):
        for name in ("token_ids", "text", "finish_reason", "error"):
            assert getattr(one, name) == getattr(other, name)
    return actual


def test_the_last_tokens_of_the_longest_context(
    engines: Any, random_ids: Callable[..., list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a maximum of 62 tokens, the longest context has 72: with the drafts of a step that follows another one, in
    whole pages of 4."""
    llm = engines[0]
    contexts: set[int] = set()
    contexts_of = ContextBuckets(62, 4, fewest=32)
    engine = llm.engine
    monkeypatch.setattr(
        engine.runner, "graphs", DecodeGraphs(engine.model, engine.cache, capture=False, contexts=contexts_of)
    )

    run = engine.runner.drafter.run

    def run_graph(step: StepPlan, *how: Any) -> StepResult:
        assert step.bucket is not None
        contexts.add(step.bucket.context)
        return run(step, *how)

    monkeypatch.setattr(engine.runner.drafter, "run", run_graph)
    same(engines, [random_ids(50, seed=3), random_ids(59, seed=4)], [replace(GREEDY, max_tokens=n) for n in (12, 3)])
    assert contexts == {72}


def test_the_same_tokens_and_drafts(engines: Any) -> None:
    """Greedy and drawn with every limit; requests that select, begin to select, and do not; lengths that end within
    accepted drafts. The modules draw with the noise of the draft's position, and with penalties for all tokens before
    it."""
    _, script, _, prompts, oracle = engines
    params = [
        GREEDY,
        replace(DRAWN, top_p=0.9),
        replace(DRAWN, temperature=0.7, top_k=20, min_p=0.02, seed=None),
        replace(PENALISED, temperature=0.9, seed=8),
    ]
    short = [replace(GREEDY, max_tokens=count) for count in (1, 2, 3, 4)]
    more = [replace(DRAWN, temperature=1.5, seed=seed) for seed in (9, 10)]  # as a rule not the likeliest tokens
    params = [*params, *short, *more]
    outputs = same(engines, [*prompts, *prompts, *prompts[1:3]], params)
    accepted = Counter[int]()
    for output in outputs[:3]:
        for position, count in enumerate(output.metrics.speculation.num_accepted_tokens_per_pos):
            accepted[position] += count
    assert set(accepted) == {0, 1, 2} and min(accepted.values()) > 0
    drawn = 0
    for (number, last), drafts in sorted(script.made.items())[::4]:
        output, of = outputs[number - 100], params[number - 100]
        tokens = [*output.prompt_token_ids, *output.token_ids][: last + 1]
        choose = partial(defined_choice, len(output.prompt_token_ids), of, script.keys[number])
        logits = oracle.drafts(tokens, 3, choose)
        for row in logits:
            tokens.append(choose(row, tokens))
        assert drafts == tokens[last + 1 :][: len(drafts)]
        drawn += tokens[last + 1 :] != logits.argmax(dim=-1).tolist()
    assert drawn > 4


def defined_choice(prompt: int, of: SamplingParams, key: int, logits: torch.Tensor, tokens: list[int]) -> int:
    """The token after ``tokens``, of which the first ``prompt`` are the prompt, from logits ``[vocab]``."""
    row = logits.clone()
    for token in {*tokens}:
        row[token] *= 1 / of.repetition_penalty if row[token] > 0 else of.repetition_penalty
    for token, count in Counter(tokens[prompt:]).items():
        row[token] -= of.frequency_penalty * count + of.presence_penalty
    if of.temperature == 0:
        return int(row.argmax())
    parameters = Parameters.of(Parameters.pack([of], [key], len(row)))
    return int(draw(row[None].float(), parameters, torch.tensor([len(tokens)]), of.asks, of.num_best))


def test_what_ends_a_request_within_a_run(engines: Any) -> None:
    """Stop tokens, a stop string, an end of text; requests that need the host beside others that do not."""
    *_, plain, prompts, _ = engines
    outputs = plain.generate(prompts, [GREEDY, replace(DRAWN, seed=5), GREEDY, GREEDY])
    stops = [output.token_ids[5 + i] for i, output in enumerate(outputs)]
    params = [
        replace(GREEDY, stop_token_ids=stops[:1]),
        replace(DRAWN, seed=5, stop_token_ids=stops[1:2], logprobs=1, max_tokens=12),
        replace(GREEDY, stop_token_ids=stops[2:3], min_tokens=7),
        replace(PENALISED, logit_bias={7: 1.0}, max_tokens=9),
    ]
    actual = same(engines, [*prompts, prompts[0]], [*params, GREEDY])
    assert [output.finish_reason for output in actual] == ["stop"] * 3 + ["length"] * 2


@pytest.mark.parametrize(
    ("asked", "steps"),
    [
        ({}, {True}),
        ({"logprobs": 1}, {False}),
        ({"logit_bias": {7: 1.0}}, {False}),
        ({"allowed_token_ids": [*range(5, 60)]}, {False}),
        ({"min_tokens": 20}, {False}),
        ({"min_tokens": 8}, {False, True}),
    ],
)
def test_a_step_that_needs_the_host_is_eager_as_a_whole(
    shared: Any, asked: dict[str, Any], steps: set[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its plan is not padded and no graph runs a part of it; another request does not need the host."""
    llm, script, plain, prompts, _ = shared
    runner, ran, actual, script.outputs = llm.engine.runner, [], set(), {}
    launch, run = runner.launch, runner.graphs.run

    def launched(plan: StepPlan, before: StepResult | None = None) -> StepResult:
        ran.clear()
        samples = launch(plan, before)
        if plan.decodes and plan.own.chunks[0].start >= plan.own.chunks[0].request.num_prefill_tokens:
            actual.add(plan.bucket is not None)
            assert len(ran) == (plan.bucket is not None)
        return samples

    monkeypatch.setattr(runner, "launch", launched)
    monkeypatch.setattr(runner.graphs, "run", lambda name, function: ran.append(name) or run(name, function))
    monkeypatch.setattr(llm.engine, "async_scheduling", True)
    params = [replace(GREEDY, **asked), replace(GREEDY, max_tokens=3)]  # the former is the last to end
    outputs = [one.generate(prompts[1:3], params) for one in (llm, plain)]
    assert [output.token_ids for output in outputs[0]] == [output.token_ids for output in outputs[1]]
    assert actual == steps


def test_requests_that_come_and_go(engines: Any) -> None:
    """Some are prefilled while others decode, one is cancelled, one is preempted: nothing else changes."""
    llm, script, plain, prompts, _ = engines
    engine = llm.engine
    params = [GREEDY, PENALISED, PENALISED, GREEDY, GREEDY, PENALISED, DRAWN, GREEDY]
    expected = [output.token_ids for output in plain.generate([*prompts, *prompts], params)]
    script.outputs = {200 + i: tokens for i, tokens in enumerate(expected)}
    engine.ids = itertools.count(200)
    requests, steps = [], 0
    while len(requests) < 8 or engine.scheduler.has_work:
        if steps % 2 == 0 and len(requests) < 8:
            number = len(requests)
            requests.append(engine.add([*prompts, *prompts][number], params[number]))
        engine.step()
        steps += 1
        if steps == 7:
            engine.finish(requests[1], "abort")
        if steps in (9, 12):
            engine.scheduler.preempt(requests[2])
    assert requests[1].output == expected[1][: len(requests[1].output)] and requests[1].finish_reason == "abort"
    assert [request.output for request in requests if request is not requests[1]] == [*expected[:1], *expected[2:]]
    assert requests[2].preemptions == 2


def test_the_caches_are_full(engines: Any) -> None:
    """Pages are taken for the case that every draft is accepted; a request without them is preempted."""
    llm, script, plain, prompts, _ = engines
    scheduler = llm.engine.scheduler
    before, taken = scheduler.preemptions, scheduler.ledger
    hog = Request(-1, [0], GREEDY)
    taken.take(hog, 0, taken.free[0] - 22)  # pages of 4 tokens
    try:
        expected = [output.token_ids for output in plain.generate(prompts[:3], PENALISED)]
        llm.loop.calls.ids = itertools.count(300)
        script.outputs = {300 + i: tokens for i, tokens in enumerate(expected)}
        assert [output.token_ids for output in llm.generate(prompts[:3], PENALISED)] == expected
        assert scheduler.preemptions > before
    finally:
        taken.release(hog)
