"""What an emulated rank would have spent in communication: its program, played again on modelled links.

The computation is measured, the communication is not: it follows from the bytes of each collective and the figures of
:class:`dsa_engine.parallel.links.Links`. The two are always reported apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from dsa_engine.engine.engine import Engine
from dsa_engine.measure.costs.stream_model import Compute, Operation, Reach, Start, Wait, play
from dsa_engine.measure.emulation.mesh import emulated
from dsa_engine.measure.emulation.stand_ins import StandIns
from dsa_engine.measure.stage_timer import EMULATION, DeviceClock, StageTimer, current_stage
from dsa_engine.parallel.collective_log import CollectiveLog
from dsa_engine.parallel.links import Links


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

    Measured work stands where it was measured, on the main stream, without the time in which emulated groups made up
    their results. A collective begins when the program issues it (`measure/costs/stream_model.py`). The program waits
    for a synchronous one at once, and for an asynchronous one where it waits in truth; so an asynchronous collective
    hides behind the work measured between, and never more than that. What a task of a side stream did is played beside
    the main stream, from the place where that has started it.

    The shared expert on its side stream, which in a real run lies beside the dispatch too, is not counted as hiding
    anything: what is measured is that it lies beside gate and experts. The other ranks are taken to be at the same
    point at the same time; waiting for a slower rank is in no figure.

    Args:
        log: of one pass, read from an emulated run; its marks are ``clock``'s.
        begin: the mark at which the pass began.
        machines: the machine of every rank of the mesh.
    """
    result = Communication()
    main: list[Operation] = []
    tasks: dict[int, list[Operation]] = {}
    stream, last = main, begin
    for event in log.events:
        stream.append(Compute(clock.seconds(last, event.before)))
        last, task = event.after, ("task", event.number)
        if event.what == "fork":
            main.append(Reach(task))
            tasks[event.number] = [Wait(task)]
        elif event.what == "enter":
            stream = tasks[event.number]
        elif event.what == "leave":
            stream = main
        elif event.what == "join":
            tasks[event.number].append(Reach((*task, "end")))
            main.append(Wait((*task, "end"), event.stage))
        else:
            collective = log.collectives[event.number]
            if event.what == "begin":
                transfer = links.transfer(collective, machines)
                _add(result.total, collective.stage, transfer.seconds)
                stream.append(Start(event.number, transfer, (collective.ranks, collective.communicator)))
            if event.what == "wait" or not collective.asynchronous:
                stream.append(Wait(event.number, collective.stage))
    result.stalls = play([main, *tasks.values()]).waits
    return result


@dataclass
class Pass:
    """One forward pass, watched: stages, and collectives where the rank is emulated. Read it when it is over."""

    timer: StageTimer
    log: CollectiveLog | None
    machines: Sequence[int]
    stand_ins: float = 0.0  # seconds that it takes to stand in for the other ranks, run alone

    def stage_seconds(self) -> dict[str, float]:
        """Seconds of the rank's own work, by stage."""
        return {name: s for name, s in self.timer.seconds().items() if name != EMULATION}

    def communication(self, links: Links) -> Communication | None:
        """The communication of an emulated rank, modelled; None on a mesh that communicates."""
        if self.log is None:
            return None
        return replay(self.log, self.timer.begin, self.timer.clock, links, self.machines)


@contextmanager
def watched(engine: Engine) -> Iterator[Pass]:
    """Times the stages of what runs inside and, of an emulated rank, writes down its collectives."""
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
