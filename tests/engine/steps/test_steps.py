"""Steps that are launched ahead: the order of launches and reads, a step too many, and equal results.

On CUDA this is the default. On a CPU a launch computes at once, but the loop is the same.
"""

from __future__ import annotations

import itertools
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from dsa_engine import LLM, RequestOutput, SamplingParams
from dsa_engine.engine.requests.request import Request
from dsa_engine.engine.requests.samples import ReadSamples, StepResult, key_of
from dsa_engine.engine.steps.batch import known_ids
from dsa_engine.measure.timed_generation import generate_batch

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
PROMPTS = [[5, 6, 7, 8], [9] * 20, [30, 31]]


@pytest.fixture(scope="module")
def shared(demo_cache: Path) -> LLM:
    return LLM(
        "demo-random",
        dtype="float32",
        max_model_len=512,
        cache_memory="8MiB",
        page_size=8,
        enforce_eager=True,  # a graph that is not captured yet is not launched ahead
        progress=False,
    )


@pytest.fixture(autouse=True)
def ahead(shared: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """It launches ahead."""
    monkeypatch.setattr(shared.engine, "async_scheduling", True)


class Log:
    """Records launches and reads in order; a launch has its step's number, "prefill" or "decode", and sequences."""

    def __init__(self, llm: LLM, monkeypatch: pytest.MonkeyPatch):
        self.events: list[tuple[str, int]] = []
        self.steps: list[tuple[str, list[int]]] = []
        launch, read = llm.engine.runner.launch, StepResult.read
        numbers: dict[int, int] = {}

        def logged_launch(plan: Any, sampled: torch.Tensor | None) -> StepResult:
            numbers[id(result := launch(plan, sampled))] = number = len(self.steps)
            self.steps.append(
                ("decode" if plan.decodes else "prefill", [request.id for request, *_ in plan.own.wanted])
            )
            self.events.append(("launch", number))
            self._kept.append(result)
            return result

        def logged_read(samples: StepResult) -> ReadSamples:
            self.events.append(("read", numbers[id(samples)]))
            return read(samples)

        self._kept: list[StepResult] = []  # or their ids would come again
        monkeypatch.setattr(llm.engine.runner, "launch", logged_launch)
        monkeypatch.setattr(StepResult, "read", logged_read)


def test_a_decode_step_is_launched_before_the_one_before_is_read(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    log = Log(llm, monkeypatch)
    outputs = llm.generate(PROMPTS, GREEDY)
    assert [len(o.token_ids) for o in outputs] == [12] * 3
    assert [kind for kind, _ in log.steps] == ["prefill"] + ["decode"] * 11, "max_tokens is known: no step too many"
    expected = [("launch", 0)]
    for number in range(1, 12):
        expected += [("launch", number), ("read", number - 1)]
    assert log.events == [*expected, ("read", 11)]


def test_what_is_under_way_is_read_before_a_prefill(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    log, engine = Log(llm, monkeypatch), llm.engine
    first = engine.add(PROMPTS[0], GREEDY)
    for _ in range(3):
        engine.step()
    second = engine.add(PROMPTS[1], GREEDY)
    while engine.scheduler.has_work:
        engine.step()
    assert len(first.output) == len(second.output) == 12
    prefill = [kind for kind, _ in log.steps].index("prefill", 1)
    at = log.events.index(("launch", prefill))
    assert log.events[at - 1] == ("read", prefill - 1)
    flying = maximum = 0
    for what, _ in log.events:
        flying += 1 if what == "launch" else -1
        maximum = max(maximum, flying)
    assert (flying, maximum) == (0, 2)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: a CPU is never waited for")
def test_decode_never_waits_for_the_device(llm: LLM) -> None:
    """It waits only for the tokens that it reads, with any parameters."""
    asks_for_all = SamplingParams(
        temperature=0.8,
        top_p=0.9,
        top_k=20,
        min_p=0.01,
        max_tokens=12,
        min_tokens=12,
        stop_token_ids=[7],
        seed=1,
        logprobs=2,
        repetition_penalty=1.2,
        frequency_penalty=0.5,
        presence_penalty=0.1,
        logit_bias={5: 1.0},
        allowed_token_ids=list(range(300)),
        bad_words=["ab"],
    )
    engine = llm.engine
    sequences = [engine.add(PROMPTS[1], params, llm.tokenizer) for params in (GREEDY, asks_for_all)]
    while min(len(s.output) for s in sequences) < 3:
        engine.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        while engine.scheduler.has_work:
            engine.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert [len(s.output) for s in sequences] == [12, 12]


def test_the_same_as_one_after_the_other(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests end by length, a stop token, an end of text, a stop string or an error, or are closed."""
    greedy = llm.generate(PROMPTS[0], GREEDY)[0].token_ids
    text = llm.tokenizer.decode(greedy[4:6])
    params = [
        GREEDY,
        SamplingParams(temperature=0.0, max_tokens=12, stop_token_ids=[greedy[7]], ignore_eos=True),
        SamplingParams(temperature=0.0, max_tokens=12, stop=text, ignore_eos=True),
        SamplingParams(temperature=1.2, top_p=0.9, min_p=0.01, top_k=100, max_tokens=60, seed=3, logprobs=2),
        SamplingParams(temperature=0.0, max_tokens=1),
        SamplingParams(temperature=0.0, max_tokens=12, min_tokens=9, stop_token_ids=greedy[2:4], logprobs=0),
        SamplingParams(max_tokens=5, min_tokens=2, stop_token_ids=list(range(320))),  # fails at once
        SamplingParams(temperature=0.7, max_tokens=30),  # a seed from its number
        SamplingParams(temperature=0.0, max_tokens=30, repetition_penalty=1.4, frequency_penalty=0.3, ignore_eos=True),
        SamplingParams(temperature=0.9, max_tokens=30, presence_penalty=1.5, bad_words=["ee", "at", "x"], seed=2),
    ]
    prompts = [PROMPTS[0]] * len(params)

    def run() -> list[RequestOutput]:
        llm.loop.calls.ids = itertools.count(1000)  # seeds of requests without one follow from it
        return llm.generate(prompts, params)

    ahead = run()
    monkeypatch.setattr(llm.engine, "async_scheduling", False)
    for one, other in zip(ahead, run(), strict=True):
        for name in ("token_ids", "text", "finish_reason", "error"):
            assert getattr(one, name) == getattr(other, name)
        assert [list(of) for of in one.logprobs or []] == [list(of) for of in other.logprobs or []]
        # Another row in the batch changes the rounding.
        assert one.cumulative_logprob == pytest.approx(other.cumulative_logprob, abs=1e-3)
    assert [o.finish_reason for o in ahead[:3]] == ["length", "stop", "stop"] and ahead[6].finish_reason == "error"
    assert ahead[1].token_ids[-1] == greedy[7] and ahead[4].token_ids == greedy[:1]


def test_a_step_too_many_is_dropped(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """One more step is in flight when a stop token is read; its token is dropped, and pages and batch are free."""
    greedy = llm.generate(PROMPTS[0], GREEDY)[0].token_ids
    stop = next(i for i in range(3, 12) if greedy[i] not in greedy[:i])
    log = Log(llm, monkeypatch)
    params = SamplingParams(temperature=0.0, max_tokens=12, stop_token_ids=[greedy[stop]], ignore_eos=True)
    stopped, other = llm.generate([PROMPTS[0], PROMPTS[2]], [params, GREEDY])
    assert stopped.token_ids == greedy[: stop + 1] and stopped.finish_reason == "stop"
    assert other.token_ids == llm.generate(PROMPTS[2], GREEDY)[0].token_ids
    sizes = [len(ids) for _, ids in log.steps[:12]]
    assert sizes == [2] * (stop + 2) + [1] * (12 - stop - 2)


def test_closing_a_stream_while_a_step_is_under_way(llm: LLM) -> None:
    wanted, logits = llm.generate(PROMPTS, GREEDY), llm.prompt_logits(PROMPTS[1])
    for pieces in (1, 2, 5):
        with closing(llm.stream(PROMPTS[1], GREEDY)) as stream:  # type: ignore[type-var]
            for _ in range(pieces):
                next(stream)
        # The step in flight concerns no request, though its pages are now another's.
        assert [o.token_ids for o in llm.generate(PROMPTS, GREEDY)] == [o.token_ids for o in wanted]
        assert torch.equal(llm.prompt_logits(PROMPTS[1]), logits)
        assert llm.engine.scheduler.free_pages == [llm.engine.cache.pages]


@pytest.mark.parametrize("error", [RuntimeError("lost"), KeyboardInterrupt()])
@pytest.mark.parametrize("at", range(4))
def test_an_error_while_reading(llm: LLM, monkeypatch: pytest.MonkeyPatch, error: BaseException, at: int) -> None:
    """The requests of that step end with their earlier tokens; other requests and the pages are not affected."""
    wanted = [llm.generate(PROMPTS[i], GREEDY)[0].token_ids for i in (0, 2)]
    request = llm.engine.add(PROMPTS[0], GREEDY)
    read, reads = StepResult.read, iter(range(100))

    def failing(samples: StepResult) -> ReadSamples:
        if next(reads) == at:
            raise error
        return read(samples)

    with monkeypatch.context() as patch:
        patch.setattr(StepResult, "read", failing)
        with pytest.raises(type(error)):
            while True:
                llm.engine.step()
    assert request.output == wanted[0][:at] and request.exception is error and request.finish_reason == "error"
    assert llm.engine.scheduler.free_pages == [llm.engine.cache.pages]
    later = llm.engine.add(PROMPTS[2], GREEDY)
    while llm.engine.has_work:
        llm.engine.step()
    assert later.output == wanted[1] and request.output == wanted[0][:at]


def test_an_error_while_reading_after_a_launch(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The requests of the step that cannot be read end; the step launched after it is read for the others."""
    wanted = llm.generate(PROMPTS[0], GREEDY)[0].token_ids
    first = llm.engine.add(PROMPTS[0], GREEDY)
    while len(first.output) < 3:
        llm.engine.step()
    second, read = llm.engine.add(PROMPTS[1], GREEDY), StepResult.read

    def failing(step: StepResult) -> ReadSamples:
        if step.samples.keys.tolist() == [key_of(second)]:  # its prefill, after which both have been launched
            raise RuntimeError("lost")
        return read(step)

    with monkeypatch.context() as patch:
        patch.setattr(StepResult, "read", failing)
        with pytest.raises(RuntimeError, match="lost"):
            while True:
                llm.engine.step()
    assert second.finish_reason == "error" and llm.engine.in_flight
    while llm.engine.has_work:
        llm.engine.step()
    assert first.output == wanted


def test_a_request_ends_between_what_is_read_and_what_is_launched(llm: LLM) -> None:
    """The next step has been scheduled with it and runs without it; if no request remains, another one is scheduled."""
    engine = llm.engine
    wanted = {i: llm.generate(PROMPTS[i], GREEDY)[0].token_ids for i in (0, 2)}
    for gone in ([1], [1, 2]):
        sequences = [engine.add(PROMPTS[0], GREEDY)]
        for _ in range(3):
            engine.step()
        sequences += [engine.add(PROMPTS[i], GREEDY) for i in (1, 2)]
        assert len(engine.step()) == 1, "a prefill is next: what is under way is read, and nothing launched"
        for i in gone:
            engine.finish(sequences[i], "abort")
        late = engine.add(PROMPTS[2], GREEDY)
        while engine.scheduler.has_work:
            engine.step()
        assert sequences[0].output == wanted[0] and late.output == wanted[2]
        assert sequences[2].output == ([] if 2 in gone else wanted[2])


def test_a_part_of_a_prompt_does_not_keep_a_token_waiting(demo_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk of one token looks like a decode step, and is launched ahead."""
    llm = LLM(
        "demo-random", device="cpu", max_model_len=64, cache_memory="8MiB", max_num_batched_tokens=1, progress=False
    )
    llm.engine.async_scheduling = True
    log = Log(llm, monkeypatch)
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    sequences = [llm.engine.add([5], params), llm.engine.add([6] * 30, params)]
    parts = 0
    while llm.engine.scheduler.has_work:
        llm.engine.step()
        if not log.steps[-1][1]:
            parts += 1
            assert [s.placeholders for s in sequences] == [[], []]
    assert parts >= 29 and [len(s.output) for s in sequences] == [3, 3]


@pytest.mark.parametrize("fill_cache", [False, True])
def test_measured_tokens(llm: LLM, fill_cache: bool) -> None:
    """Each token has one time, though the first call of a step returns none."""
    run = generate_batch(llm.engine, [[5] * 40, [6] * 40], 6, fill_cache=fill_cache)
    assert run.decoded_tokens == len(run.itl) == 5 and min(run.itl) > 0
    assert run.first_token_steps == ([] if fill_cache else [0, 0])


def test_tokens_that_are_not_read_have_placeholders() -> None:
    request = Request(0, [1, 2, 3], SamplingParams(), output=[4], placeholders=[6])
    assert len(request) == 5 and len(request.prompt) == 3
    assert [[*request.tokens(*part)] for part in ((1, 4), (4, 1), (2, 2))] == [[2, 3, 4, -7], [-7], [3, 4]]
    request.placeholders += [0, 2]
    assert len(request) == 7 and [[*request.tokens(*part)] for part in ((3, 4), (5, 1))] == [[4, -7, -1, -3], [-1]]
    sampled = torch.tensor([50, 51, -1, 53, 54, 55, 56])
    ids = torch.tensor([[2, -7], [-3, 9]])
    assert known_ids(ids, sampled, torch.device("cpu")).tolist() == [[2, 56], [0, 9]], "an error's code is no token"
    assert known_ids(ids[:1, :1], None, torch.device("cpu")).tolist() == [[2]]
