"""One ``LLM`` used by several threads: each gets the same tokens as alone, whatever the others do."""

from __future__ import annotations

import contextlib
import functools
import gc
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from dsa_engine import LLM, CapacityError, RequestOutput, SamplingParams

THREADS = 8
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
ROOM = 128  # tokens in the cache


@pytest.fixture(scope="module")
def shared(tiny_llm: Callable[..., LLM]) -> LLM:
    return tiny_llm(ROOM)


def assert_idle(llm: LLM) -> None:
    llm.wait_idle()
    scheduler, pages = llm.engine.scheduler, llm.engine.cache.pages
    assert not scheduler.has_work
    assert scheduler.free_pages == [pages]


@pytest.fixture
def llm(shared: LLM) -> Iterator[LLM]:
    yield shared
    assert_idle(shared)


@dataclass
class Job:
    """A user's call, and its expected tokens."""

    kind: str
    prompts: list[list[int]]
    params: list[SamplingParams]
    expected: list[list[int]]
    leaves_after: int = 0  # pieces


def random_params(rng: random.Random) -> SamplingParams:
    return SamplingParams(
        max_tokens=rng.choice([1, 2, 5, 12, 25]),
        ignore_eos=rng.random() < 0.8,
        temperature=rng.choice([0.0, 0.8]),
        top_p=rng.choice([1.0, 0.9]),
        seed=rng.randrange(1000),
        stop=rng.choice([None, None, ["e"], ["ab", "qu"]]),
    )


def random_job(llm: LLM, rng: random.Random) -> Job:
    """A random call, with the tokens that it gets alone."""
    kind = rng.choice(["generate", "stream", "chat", "leave", "too large", "bad token", "no token left"])
    prompts = [
        [rng.randrange(4, 320) for _ in range(rng.choice([1, 3, 8, 24, 30]))]
        for _ in range(rng.choice([1, 1, 2, 3]) if kind == "generate" else 1)
    ]
    params = [random_params(rng) for _ in prompts]
    if kind == "chat":
        expected = llm.chat([{"role": "user", "content": f"{prompts}"[:20]}], params)
    elif kind in ("generate", "stream", "leave"):
        expected = llm.generate(prompts, params)
    else:
        return Job(kind, prompts, params, [])
    return Job(kind, prompts, params, [output.token_ids for output in expected], rng.randrange(1, 5))


@pytest.fixture(scope="module")
def random_jobs(shared: LLM) -> Callable[[int], list[Job]]:
    """``random_jobs(count)``: the same every time."""

    @functools.cache
    def make(count: int) -> list[Job]:
        rng = random.Random(count)
        return [random_job(shared, rng) for _ in range(count)]

    return make


def do(llm: LLM, job: Job) -> None:
    """Runs a call and checks its tokens."""
    prompt, params = job.prompts[0], job.params[0]
    outputs: list[RequestOutput] = []
    if job.kind == "generate":
        outputs = llm.generate(job.prompts, job.params)
    elif job.kind == "chat":
        outputs = llm.chat([{"role": "user", "content": f"{job.prompts}"[:20]}], job.params)
    elif job.kind == "stream":
        pieces = list(llm.stream(prompt, params))
        assert [t for piece in pieces for t in piece.token_ids] == job.expected[0]
        assert [piece.finish_reason is None for piece in pieces] == [True] * (len(pieces) - 1) + [False]
    elif job.kind == "leave":
        tokens: list[int] = []
        with contextlib.closing(llm.stream(prompt, params)) as stream:  # type: ignore[type-var]
            for number, piece in enumerate(stream):
                tokens += piece.token_ids
                if number == job.leaves_after:
                    break
        assert tokens == job.expected[0][: len(tokens)]
    elif job.kind == "too large":
        with pytest.raises(CapacityError):
            llm.generate([prompt, [9] * (ROOM - 28)], SamplingParams(max_tokens=200))
    elif job.kind == "bad token":
        with pytest.raises(ValueError, match="token id 320 is out of range"):
            llm.generate([prompt, [320]], params)
    else:
        forbidding = SamplingParams(min_tokens=1, stop_token_ids=list(range(320)))
        (output,) = llm.generate([prompt], forbidding)
        assert output.finish_reason == "error" and output.error is not None and output.token_ids == []
    assert [output.token_ids for output in outputs] == (job.expected if outputs else [])


def wait_until(holds: Callable[[], bool]) -> None:
    """Waits for a condition: the loop takes messages between two steps."""
    end = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.001)


def run_threads(work: Callable[[int], object], threads: int = THREADS) -> None:
    """Runs ``work(number)`` in as many threads, all at once; the first error is raised."""
    start = threading.Barrier(threads)

    def begin(number: int) -> None:
        start.wait()
        work(number)

    with ThreadPoolExecutor(threads) as pool:
        for done in [pool.submit(begin, number) for number in range(threads)]:
            done.result()


def test_two_threads_do_not_share_tokens(llm: LLM) -> None:
    """A bug of the past: with two equal prompts at once, each token came twice."""
    alone = llm.generate([[5, 6, 7]], GREEDY)[0].token_ids
    results: list[list[int]] = []
    run_threads(lambda _: results.append(llm.generate([[5, 6, 7]], GREEDY)[0].token_ids), 2)
    assert results == [alone, alone]


@pytest.mark.parametrize("requests", [120, pytest.param(2000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("ahead", [False, True])
def test_stress(
    llm: LLM, random_jobs: Callable[[int], list[Job]], monkeypatch: pytest.MonkeyPatch, requests: int, ahead: bool
) -> None:
    """Eight threads make all kinds of calls at once; each gets the same tokens as alone."""
    jobs = random_jobs(requests)
    monkeypatch.setattr(llm.engine, "async_scheduling", ahead)
    before = llm.engine.scheduler.preemptions
    maximum = [0]
    step = llm.engine.step

    def counted() -> Any:
        maximum[0] = max(maximum[0], len(llm.engine.scheduler.running) + len(llm.engine.scheduler.waiting))
        return step()

    monkeypatch.setattr(llm.engine, "step", counted)
    run_threads(lambda number: [do(llm, job) for job in jobs[number::THREADS]])
    kinds = Counter(job.kind for job in jobs)
    print(kinds, f"{llm.engine.scheduler.preemptions - before} preemptions, {maximum[0]} calls at once")
    assert len(kinds) == 7 and sum(len(job.prompts) for job in jobs) > requests
    assert maximum[0] >= THREADS - 2, "their requests run together"


def test_requests_of_all_threads_share_steps(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Continuous batching over callers: a step computes the requests of several threads."""
    sizes: list[int] = []
    plan = llm.engine.runner.plan

    def counted(chunks: list[Any]) -> Any:
        sizes.append(len(chunks))
        return plan(chunks)

    monkeypatch.setattr(llm.engine.runner, "plan", counted)
    run_threads(lambda n: llm.generate([[5 + n, 6]], SamplingParams(max_tokens=40, ignore_eos=True)))
    assert max(sizes) >= THREADS - 2
    assert len(sizes) < THREADS * 40 / 2, "and there are far fewer steps than alone"


def test_a_step_that_fails_ends_those_who_were_part_of_it(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = [llm.generate([[5 + n] * 3], GREEDY)[0].token_ids for n in range(THREADS)]
    launch, poison = llm.engine.runner.launch, [11] * 3  # the prompt of thread 6

    def failing(plan: Any, *rest: Any) -> Any:
        requests = [chunk.request for rank in plan.ranks for chunk in rank.chunks]
        if any(request.prompt == poison and not request.prefilled for request in requests):
            raise RuntimeError("out of memory")
        return launch(plan, *rest)

    monkeypatch.setattr(llm.engine.runner, "launch", failing)
    monkeypatch.setattr(llm.engine.scheduler, "_max_num_seqs", 1)  # each request is prefilled alone
    ended: dict[int, Any] = {}

    def work(number: int) -> None:
        try:
            ended[number] = llm.generate([[5 + number] * 3], GREEDY)[0].token_ids
        except RuntimeError as error:
            ended[number] = str(error)

    run_threads(work)
    assert ended.pop(6) == "out of memory"
    assert ended == {number: expected[number] for number in range(THREADS) if number != 6}


def test_an_interrupt_of_the_main_thread_leaves_the_others_alone(
    llm: LLM, random_jobs: Callable[[int], list[Job]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C at random moments, while the main thread runs steps and while it waits."""
    rng = random.Random(3)
    jobs = [job for job in random_jobs(120) if job.kind in ("generate", "stream")]
    over = threading.Event()
    failures: list[BaseException | None] = []

    def drop_interrupts(one: Any) -> None:
        if one.exc_type is not KeyboardInterrupt:
            failures.append(one.exc_value)

    # Python drops it within a destructor; pytest would report that as a failure.
    monkeypatch.setattr(sys, "unraisablehook", drop_interrupts)

    def work(number: int) -> None:
        try:
            for job in jobs[number::3]:
                do(llm, job)
        except BaseException as error:
            failures.append(error)

    def interrupt() -> None:
        while not over.wait(rng.uniform(0.001, 0.05)):
            signal.pthread_kill(main, signal.SIGINT)

    main = threading.main_thread().ident
    assert main is not None
    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    disturber = threading.Thread(target=interrupt)
    interrupted = finished = 0
    for thread in [*threads, disturber]:
        thread.start()
    try:
        while any(thread.is_alive() for thread in threads):
            try:
                assert len(llm.generate([[5, 6, 7], [8, 9]], GREEDY)[0].token_ids) == 12
                finished += 1
            except KeyboardInterrupt:
                interrupted += 1
    finally:
        while True:
            try:
                over.set()
                disturber.join()
                time.sleep(0.05)
                break
            except KeyboardInterrupt:
                continue
    for thread in threads:
        thread.join()
    print(f"{interrupted} calls were interrupted, {finished} were not")
    assert not failures and interrupted > 10
    llm.generate([[5]], GREEDY)  # frees what interrupted calls refer to


def test_what_needs_the_engine_alone_waits_for_it(llm: LLM) -> None:
    """``prompt_logits`` in four threads beside four streams: running requests are finished first, later ones wait."""
    ids = list(range(4, 60))
    logits, wanted = llm.prompt_logits(ids), llm.generate([[5, 6, 7]], GREEDY)[0].token_ids

    def work(number: int) -> None:
        for _ in range(4):
            if number % 2:
                assert torch.equal(llm.prompt_logits(ids), logits)
            else:
                pieces = list(llm.stream([5, 6, 7], GREEDY))
                assert [t for piece in pieces for t in piece.token_ids] == wanted

    run_threads(work)
    stream = llm.stream([5, 6, 7], GREEDY)
    next(stream)
    run_threads(lambda _: llm.prompt_logits(ids), 1)  # the stream runs to its end though no caller advances it
    assert len([t for piece in stream for t in piece.token_ids]) == 11


def test_a_stream_that_is_never_closed(llm: LLM) -> None:
    """Its request ends when the garbage collector frees it, in any thread."""
    streams = [llm.stream([5 + n], SamplingParams(max_tokens=100, ignore_eos=True)) for n in range(3)]
    for stream in streams:
        next(stream)
    last = streams.pop()
    del streams, stream
    gc.collect()
    wait_until(lambda: len(llm.engine.scheduler.running) == 1)
    run_threads(lambda _: last.close(), 1)  # type: ignore[attr-defined]


def test_a_call_from_within_a_call_is_refused(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    launch = llm.engine.runner.launch

    def nested(*args: Any) -> Any:
        with pytest.raises(RuntimeError, match="a call from within another call of the same thread"):
            llm.generate([[5]], GREEDY)
        return launch(*args)

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.runner, "launch", nested)
        assert len(llm.generate([[5, 6]], GREEDY)[0].token_ids) == 12
