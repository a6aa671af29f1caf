"""One ``LLM`` used by several threads, whatever the others do; a random mixture of calls is in ``test_loop.py``."""

from __future__ import annotations

import gc
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from dsa_engine import LLM, SamplingParams

THREADS = 8
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
ROOM = 128  # tokens in the cache


@pytest.fixture(scope="module")
def shared(tiny_llm: Callable[..., LLM]) -> LLM:
    return tiny_llm(ROOM)


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


def test_requests_of_all_threads_share_steps(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Continuous batching over callers: a step computes the requests of several threads."""
    sizes: list[int] = []
    plan = llm.engine.runner.plan

    def counted(step: Any) -> Any:
        sizes.append(len(step.chunks))
        return plan(step)

    monkeypatch.setattr(llm.engine.runner, "plan", counted)
    run_threads(lambda n: llm.generate([[5 + n, 6]], SamplingParams(max_tokens=40, ignore_eos=True)))
    assert max(sizes) >= THREADS - 2
    assert len(sizes) < THREADS * 40 / 2, "and there are far fewer steps than alone"


def test_an_interrupt_of_the_main_thread_leaves_the_others_alone(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C at random moments, while the main thread runs steps and while it waits."""
    rng = random.Random(3)
    prompts = [[rng.randrange(4, 320) for _ in range(rng.choice([1, 3, 8, 24]))] for _ in range(60)]
    wanted = [llm.generate([prompt], GREEDY)[0].token_ids for prompt in prompts]
    over = threading.Event()
    failures: list[BaseException | None] = []

    def drop_interrupts(one: Any) -> None:
        if one.exc_type is not KeyboardInterrupt:
            failures.append(one.exc_value)

    # Python drops it within a destructor; pytest would report that as a failure.
    monkeypatch.setattr(sys, "unraisablehook", drop_interrupts)

    def work(number: int) -> None:
        try:
            for prompt, tokens in list(zip(prompts, wanted, strict=True))[number::3]:
                assert llm.generate([prompt], GREEDY)[0].token_ids == tokens
                assert [t for piece in llm.stream(prompt, GREEDY) for t in piece.token_ids] == tokens
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
