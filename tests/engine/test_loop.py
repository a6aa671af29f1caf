"""The loop under many callers of all kinds, and its end: nothing is wrong, lost or left over."""

from __future__ import annotations

import asyncio
import atexit
import gc
import os
import pickle
import subprocess
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from callers import Kind, check_found, make_kinds, run_callers
from dsa_engine import LLM, SamplingParams
from dsa_engine.engine.calls.call import Abort, CallResult, Shutdown
from dsa_engine.engine.calls.jobs import Run
from dsa_engine.engine.loop import EngineLoop
from dsa_engine.engine.requests import request as request_module
from dsa_engine.engine.requests.limits import Add
from dsa_engine.text.tokenizer import Tokenizer

THREADS = 8
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
ENDLESS = SamplingParams(temperature=0.0, max_tokens=150, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tiny_llm: Callable[..., LLM]) -> LLM:
    return tiny_llm(160)


@pytest.fixture(scope="module")
def kinds(llm: LLM) -> list[Kind]:
    return make_kinds(llm, 40, longest=30)


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("requests, tasks", [(200, 60), pytest.param(2000, 500, marks=pytest.mark.slow)])
@pytest.mark.parametrize("ahead", [False, True])
def test_threads_and_tasks_at_once(
    llm: LLM, kinds: list[Kind], monkeypatch: pytest.MonkeyPatch, requests: int, tasks: int, ahead: bool
) -> None:
    """Eight threads and an event loop full of tasks, cancelled at random: each token is that of a request alone."""
    monkeypatch.setattr(llm.engine, "async_scheduling", ahead)
    gc.collect()
    threads, files = set(threading.enumerate()), open_files()  # those of earlier tests may still end meanwhile
    answers, cancelled = run_callers(llm, kinds, requests, tasks, THREADS)
    check_found(answers, kinds)
    ended = Counter(how for *_, how in answers)
    print(ended, f"{cancelled} cancelled, {llm.engine.scheduler.preemptions} preemptions")
    assert ended.total() + cancelled == requests // THREADS * THREADS + tasks and cancelled > 0
    assert set(ended) == {"generated", "streamed", "left"}
    scheduler, pages = llm.engine.scheduler, llm.engine.cache.pages
    assert not scheduler.has_work and scheduler.free_pages == [pages]
    gc.collect()
    assert set(threading.enumerate()) <= threads and open_files() <= files


def test_messages_can_be_pickled() -> None:
    """Messages are pickled, as when rank 0 sends them."""
    add = Add([1, 2], SamplingParams(stop=["a"], logit_bias={3: 1.0}, seed=4), [[5]], 1.5, 7)
    for message in (add, Abort((1, 2)), Run(3, "prompt_logits", [4]), CallResult(0, None), Shutdown()):
        assert pickle.loads(pickle.dumps(message)) == message


def test_no_step_waits_for_the_digests_of_a_prompt(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    made, digest = Counter[bool](), request_module._digest
    count = lambda data: made.update([threading.current_thread() is llm.loop.thread]) or digest(data)  # noqa: E731
    monkeypatch.setattr(request_module, "_digest", count)
    size = llm.engine.cache.page_size
    llm.generate([[5] * (2 * size + 1)], SamplingParams(max_tokens=1))
    assert made == {False: 3, True: 1}, "of the salt and two pages; the engine looks whether the salt is the same"


def test_a_stop_string_ends_the_request_itself(llm: LLM) -> None:
    """It is found on the caller's side, and aborts a request that would run for long."""
    free = llm.generate([[5, 6, 7]], ENDLESS)[0]
    stop = next(text for text in free.text[20:] if text.isprintable() and text.strip())
    before = llm.loop.steps
    output = llm.generate([[5, 6, 7]], SamplingParams(temperature=0.0, max_tokens=150, ignore_eos=True, stop=[stop]))[0]
    llm.wait_idle()
    assert (
        output.finish_reason == "stop"
        and output.outputs[0].stop_reason == stop
        and output.text == free.text.split(stop)[0]
    )
    assert llm.loop.steps - before < 150  # it did not run to its end, however late its caller's thread came


class Panic(BaseException):
    """Like a panic of Rust, which is no ``Exception``."""


def test_a_panic_in_the_text_of_one_request(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted, other = (out.token_ids for out in llm.generate([[5, 6, 7], [9]], GREEDY))
    decode = Tokenizer.decode

    def panics(self: Tokenizer, ids: list[int], *rest: Any, **how: Any) -> str:
        if wanted[3] in ids and other[3] not in ids:
            raise Panic("index out of bounds")
        return decode(self, ids, *rest, **how)

    assert wanted[3] not in other
    with monkeypatch.context() as patch:
        patch.setattr(Tokenizer, "decode", panics)
        failed, fine = llm.generate([[5, 6, 7], [9]], GREEDY)
    assert failed.finish_reason == "error" and "Panic: index out of bounds" in str(failed.error)
    assert failed.token_ids == wanted and fine.token_ids == other
    assert llm.generate([[5, 6, 7]], GREEDY)[0].token_ids == wanted


def test_an_error_in_the_text_of_prompt_logprobs(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends that request; the other outputs of the call are there."""
    params = SamplingParams(temperature=0.0, max_tokens=2, prompt_logprobs=0, ignore_eos=True)
    fine = llm.generate([[9, 10]], params)[0]

    def fails(self: Tokenizer, token: int) -> tuple[str, bytes]:
        if token == 6:
            raise ValueError("no such token")
        return "x", b"x"

    with monkeypatch.context() as patch:
        patch.setattr(Tokenizer, "token_text_and_bytes", fails)
        failed, other = llm.generate([[5, 6, 7], [9, 10]], params)
    assert failed.finish_reason == "error" and failed.prompt_logprobs is None
    assert failed.error == "its prompt's tokens could not be decoded to text: no such token"
    assert (other.finish_reason, other.token_ids) == ("length", fine.token_ids) and other.prompt_logprobs is not None


def test_a_thread_that_cannot_be_started(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """That call fails; later ones are served, and no hook is left for the exit."""
    wanted = llm.generate([[5, 6, 7]], GREEDY)[0].token_ids

    def refused(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async def twice() -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refused)
            with pytest.raises(RuntimeError, match="can't start new thread"):
                await llm.agenerate([[5, 6, 7]], GREEDY)
        return await asyncio.wait_for(llm.agenerate([[5, 6, 7]], GREEDY), 20)

    assert asyncio.run(twice())[0].token_ids == wanted
    hooks = atexit._ncallbacks()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refused)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            EngineLoop(llm.engine)
    assert atexit._ncallbacks() == hooks


def test_a_panic_in_a_step(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The callers of that step get it; later ones are served."""
    wanted = llm.generate([[5, 6, 7]], GREEDY)[0].token_ids
    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.runner, "launch", lambda *_: (_ for _ in ()).throw(Panic("lost")))
        with pytest.raises(Panic, match="lost"):
            llm.generate([[5, 6, 7]], GREEDY)
    assert llm.generate([[5, 6, 7]], GREEDY)[0].token_ids == wanted


def test_an_error_of_no_request_ends_the_loop(tiny_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    """Callers that wait get the error, and so do later ones; nothing hangs."""
    llm = tiny_llm(160)
    stream = llm.stream([5, 6, 7], ENDLESS)
    next(stream)

    def broken() -> Any:
        raise LookupError("no such page")

    monkeypatch.setattr(llm.engine.scheduler, "schedule", broken)
    with pytest.raises(LookupError, match="no such page"):
        list(stream)
    for call in (lambda: llm.generate([[5]], GREEDY), lambda: llm.prompt_logits([5]), lambda: asyncio.run(one(llm))):
        with pytest.raises(LookupError, match="no such page"):
            call()


async def one(llm: LLM) -> Any:
    return await llm.agenerate([[5]], GREEDY)


def test_closing(tiny_llm: Callable[..., LLM]) -> None:
    with tiny_llm(160) as llm:
        stream = llm.stream([5, 6, 7], ENDLESS)
        next(stream)
    with pytest.raises(RuntimeError, match="the LLM has been closed; make another one"):
        list(stream)
    for call in (lambda: llm.generate([[5]], GREEDY), lambda: llm.stream([5], GREEDY), llm.wait_idle):
        with pytest.raises(RuntimeError, match="the LLM has been closed; make another one"):
            call()
    assert llm.engine.scheduler.free_pages == [llm.engine.cache.pages]
    llm.close()  # a second time changes nothing


def test_what_is_dropped_is_freed(tiny_llm: Callable[..., LLM]) -> None:
    """With everything that it refers to: no thread refers to it."""
    llm = tiny_llm(160)
    llm.generate([[5]], GREEDY)
    engine, thread = weakref.ref(llm.engine), llm.loop.thread
    del llm
    gc.collect()
    thread.join(20)
    gc.collect()
    assert not thread.is_alive() and engine() is None


PROGRAM = """
import sys
from dsa_engine import LLM, SamplingParams
llm = LLM("demo-random", device="cpu", max_model_len=4096, progress=False)
stream = llm.stream("def main():", SamplingParams(max_tokens=4000, ignore_eos=True))
print(len(next(stream).token_ids))
if "raise" in sys.argv:
    raise SystemExit(7)
"""


@pytest.mark.parametrize("how, status", [("end", 0), ("raise", 7)])
def test_a_program_that_does_not_close_ends(demo_cache: Path, how: str, status: int) -> None:
    """In the middle of a request that would take minutes."""
    ended = subprocess.run([sys.executable, "-c", PROGRAM, how], capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stdout) == (status, "1\n"), ended.stderr
    assert "Traceback" not in ended.stderr and "Fatal" not in ended.stderr
