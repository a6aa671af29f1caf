"""Stage times: nested stages, sums, time between stages, and misuse."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from dsa_engine import LLM
from dsa_engine.engine.calls.jobs import prefill
from dsa_engine.measure.stage_timer import StageTimer
from dsa_engine.model.profile_stages import STAGES, stage

CPU = torch.device("cpu")


class Clock:
    """A clock that is moved by hand."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    moved = Clock()
    monkeypatch.setattr(time, "perf_counter", moved)
    return moved


def test_nested_stages(clock: Clock) -> None:
    with StageTimer(CPU) as timer:
        clock.now += 1
        with stage("MLA prolog"):
            clock.now += 2
            with stage("communication"):
                clock.now += 4
            clock.now += 8
        with stage("MLA prolog"):
            clock.now += 16
        clock.now += 32
    clock.now += 64
    seconds = timer.seconds()
    assert seconds.pop("other") + seconds.pop("host") == pytest.approx(33)
    assert seconds.pop("MLA prolog") == 26  # without the stage inside
    assert seconds.pop("communication") == 4
    assert set(seconds) == set(STAGES) - {"MLA prolog", "communication"} and not any(seconds.values())


def test_a_stage_that_fails_ends(clock: Clock) -> None:
    with StageTimer(CPU) as timer:
        with pytest.raises(RuntimeError, match="broken"), stage("embedding"):
            clock.now += 1
            raise RuntimeError("broken")
        clock.now += 2
    assert timer.seconds()["embedding"] == 1 and timer.seconds()["other"] == pytest.approx(2, abs=0.1)


def test_the_host_is_this_threads_time_between_stages(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "thread_time", thread := Clock())

    def pass_time(wall: float, ran: float) -> None:
        clock.now, thread.now = clock.now + wall, thread.now + ran

    with StageTimer(CPU) as timer:
        pass_time(4, 3)
        with stage("MoE experts"):
            pass_time(5, 5)
        pass_time(2, 1)
    pass_time(1, 1)
    seconds = timer.seconds()
    assert (seconds["host"], seconds["other"], seconds["MoE experts"]) == (4, 2, 5)


def test_unknown_stage() -> None:
    message = "'lunch' is no stage; stages are embedding, MLA prolog"
    with StageTimer(CPU), pytest.raises(ValueError, match=message), stage("lunch"):
        raise AssertionError("entered")
    with stage("embedding"):  # without a timer a stage does nothing
        pass


def test_one_timer_at_a_time() -> None:
    with StageTimer(CPU):
        with pytest.raises(RuntimeError, match="a StageTimer is already running"), StageTimer(CPU):
            raise AssertionError("entered")
        with stage("embedding"):
            pass
    with StageTimer(CPU) as timer:  # and the next can begin
        pass
    assert set(timer.seconds()) == {*STAGES, "host", "other"}


def test_a_forward_pass_goes_through_every_stage(demo_cache: Path) -> None:
    """All of it is accounted for: the stages add up to the time of the whole, and little lies between them."""
    llm = LLM("demo-random", device="cpu", max_model_len=2000, progress=False)
    prompt = list(range(4, 250)) * 4  # past the demo's index_topk
    begin = time.perf_counter()
    with StageTimer(CPU) as timer:
        prefill(llm.engine, prompt)
    whole = time.perf_counter() - begin
    seconds = timer.seconds()
    idle = {name for name in STAGES if seconds[name] == 0}
    assert idle <= {"communication"}  # one rank may do without
    assert sum(seconds.values()) == pytest.approx(whole, rel=0.05)


def test_ranges_are_there_for_a_profiler_only(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    record = torch.profiler.record_function
    monkeypatch.setattr(torch.profiler, "record_function", lambda name: made.append(name) or record(name))
    with stage("MoE gate"):
        pass
    assert made == []
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile, stage("MoE gate"):
        pass
    assert made == ["MoE gate"] and "MoE gate" in {event.key for event in profile.key_averages()}
