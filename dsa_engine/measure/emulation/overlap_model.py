"""Modelled communication of an emulated rank: its program is replayed on modelled links.

The computation is measured. The communication follows from the bytes of each collective and the figures of
:class:`dsa_engine.measure.emulation.links.Links`. Reports keep the two apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from dsa_engine.engine.engine import Engine
from dsa_engine.measure.emulation.links import Links
from dsa_engine.measure.emulation.mesh import emulated
from dsa_engine.measure.emulation.stand_ins import StandIns
from dsa_engine.measure.stage_timer import EMULATION, DeviceClock, StageTimer, current_stage
from dsa_engine.parallel.collective_log import CollectiveLog


@dataclass
class Communication:
    """Modelled seconds by stage: of all collectives, and of those that the computation had to wait for."""

    total: dict[str, float] = field(default_factory=dict)
    stalls: dict[str, float] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        return sum(self.total.values())

    @property
    def stalled_seconds(self) -> float:
        return sum(self.stalls.values())

    @classmethod
    def sum(cls, parts: Iterable[Communication]) -> Communication:
        whole = cls()
        for part in parts:
            for name, seconds in part.total.items():
                _add(whole.total, name, seconds)
            for name, seconds in part.stalls.items():
                _add(whole.stalls, name, seconds)
        return whole

    def scaled(self, factor: float) -> Communication:
        return Communication(
            {name: s * factor for name, s in self.total.items()}, {name: s * factor for name, s in self.stalls.items()}
        )


def replay(log: CollectiveLog, begin: Any, clock: DeviceClock, links: Links, machines: Sequence[int]) -> Communication:
    """Plays the program of one rank again, with collectives that take the time that ``links`` say.

    The result is a bound. Measured work keeps its order on one stream, without the time in which emulated groups made
    their results. A collective begins when the program issues it and the previous one has ended (they use the same
    links). The program waits for a synchronous collective at once, and for an asynchronous one at its real wait, so an
    asynchronous collective overlaps with the work between, and with no more. The shared expert on its side stream also
    runs beside the dispatch in a real run, but is not counted as overlapping with it: only its overlap with gate and
    experts is measured. The other ranks are assumed to be at the same point at the same time; no figure includes
    waiting for a slower rank.

    Args:
        log: collectives of one pass of an emulated run; its marks are ``clock``'s.
        begin: the mark at which the pass began.
        machines: the machine of every rank of the mesh.
    """
    result = Communication()
    worked = stalled = free_at = 0.0
    done_at: dict[int, float] = {}
    last = begin
    for event in log.events:
        worked += clock.seconds(last, event.before)
        last = event.after
        now = worked + stalled
        collective = log.collectives[event.number]
        if event.what == "begin":
            seconds = links.seconds(collective, machines)
            _add(result.total, collective.stage, seconds)
            free_at = max(now, free_at) + seconds
            done_at[event.number] = free_at
        if event.what == "wait" or not collective.asynchronous:
            stall = max(0.0, done_at.pop(event.number) - now)
            _add(result.stalls, collective.stage, stall)
            stalled += stall
    return result


@dataclass
class Pass:
    """One watched forward pass: its stages and, for an emulated rank, its collectives. Read it after the pass."""

    timer: StageTimer
    log: CollectiveLog | None
    machines: Sequence[int]
    stand_ins: float = 0.0  # seconds of work in place of the other ranks, run separately

    def stage_seconds(self) -> dict[str, float]:
        """Seconds in each stage of the rank's own work."""
        return {name: s for name, s in self.timer.seconds().items() if name != EMULATION}

    def communication(self, links: Links) -> Communication | None:
        """The communication of an emulated rank, modelled; None on a mesh that communicates."""
        if self.log is None:
            return None
        return replay(self.log, self.timer.begin, self.timer.clock, links, self.machines)


@contextmanager
def watched(engine: Engine) -> Iterator[Pass]:
    """Times the stages of the work inside the context and records the collectives of an emulated rank."""
    timer = StageTimer(engine.mesh.device)
    mesh, made_up = engine.mesh, emulated(engine.mesh)
    log, stand_ins = None, StandIns()
    if made_up is not None:
        log, made_up.static_step = CollectiveLog(timer.clock.mark, current_stage), False
    for group in mesh.groups:
        group.log = log
    try:
        one = Pass(timer, log, mesh.machines)
        with timer, stand_ins.noting():
            yield one
    finally:
        for group in mesh.groups:
            group.log = None
    if made_up is not None:
        stand_ins.in_graph = made_up.static_step and engine.graphs is not None
        # At once: the tensors that they work on are held no longer than needed.
        if stand_ins.work not in made_up.stand_in_seconds:
            made_up.stand_in_seconds[stand_ins.work] = stand_ins.seconds(mesh.device)
        one.stand_ins = made_up.stand_in_seconds[stand_ins.work]


def _add(into: dict[str, float], name: str, seconds: float) -> None:
    into[name] = into.get(name, 0.0) + seconds
