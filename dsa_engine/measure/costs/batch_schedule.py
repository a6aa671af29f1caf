"""Time of MoE layers whose tokens travel under other computation: one batch, or two that pass the layers in turn.

A layer is attention and gate, a dispatch, the experts, and a combine; the shared expert runs beside the dispatch. With
one batch it hides at most that. With two batches, each stage of the first batch is followed by the same stage of the
second::

    compute   a1 s1 a2 s2 e1 e2 a1' s1' a2' …
    links        d1    d2    c1  c2 …

A collective of one batch then travels under the computation of the other. The host waits for the counts of a dispatch,
so nothing lies beside these. Transfers of a way follow each other on a side stream (`stream_model.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import NamedTuple

from dsa_engine.measure.costs.stream_model import Compute, Operation, Reach, Start, Wait, play
from dsa_engine.parallel.links import NO_TRANSFER, Transfer

DISPATCH, COMBINE = "MoE dispatch", "MoE combine"


class Legs(NamedTuple):
    """Transfers of an exchange, each by the communicator that carries it."""

    everyone: Transfer = Transfer()
    rail: Transfer = Transfer()
    machine: Transfer = Transfer()

    @property
    def seconds(self) -> float:
        """Seconds of all of them, one after the other."""
        return sum(leg.seconds for leg in self)

    def plus(self, other: Legs) -> Legs:
        return Legs(*(mine.plus(theirs) for mine, theirs in zip(self, other, strict=True)))

    def scaled(self, factor: float) -> Legs:
        return Legs(*(leg.scaled(factor) for leg in self))


class Exchange(NamedTuple):
    """A MoE layer's way to the experts, along the rail first, and back, inside the machine first."""

    counts: Legs = Legs()  # for which the host waits before tokens leave
    there: Legs = Legs()
    back: Legs = Legs()

    @property
    def dispatch(self) -> float:
        """Seconds of the way there."""
        return self.counts.seconds + self.there.seconds

    @property
    def combine(self) -> float:
        """Seconds of the way back."""
        return self.back.seconds

    def plus(self, other: Exchange) -> Exchange:
        return Exchange(*(mine.plus(theirs) for mine, theirs in zip(self, other, strict=True)))

    def scaled(self, factor: float) -> Exchange:
        return Exchange(*(legs.scaled(factor) for legs in self))


class LayerTimes(NamedTuple):
    """Seconds of one batch in one layer; a dense layer has attention and its MLP in ``attention``, and nothing else."""

    attention: float  # with everything else before the dispatch
    exchange: Exchange = Exchange()
    shared: float = 0.0
    experts: float = 0.0


@dataclass(frozen=True)
class Waits:
    """Seconds of a schedule.

    Attributes:
        computed: computation, if nothing else ran beside it.
        dispatch, combine: time in which the device waits for these collectives.
        slowed: time that computation loses to the collectives beside it.
        dispatched, combined: these collectives, hidden or not.
    """

    computed: float = 0.0
    dispatch: float = 0.0
    combine: float = 0.0
    slowed: float = 0.0
    dispatched: float = 0.0
    combined: float = 0.0

    @property
    def seconds(self) -> float:
        return self.computed + self.dispatch + self.combine + self.slowed

    def extended(self, one_less: Waits, layers: int) -> Waits:
        """The schedule with ``layers`` more layers, each as long as the last; ``one_less`` lacks this one."""
        values = ((getattr(self, f.name), getattr(one_less, f.name)) for f in fields(self))
        return Waits(*(mine + (mine - less) * layers for mine, less in values))


def schedule(batches: Sequence[Sequence[LayerTimes]], occupied: float) -> Waits:
    """The layers of one batch or of several that pass them in turn.

    Args:
        batches: the layers of each batch.
        occupied: fraction of the device that a running collective takes from computation.
    """
    return _schedule(tuple(map(tuple, batches)), occupied)


@lru_cache(maxsize=4096)  # a planner asks for most of them more than once
def _schedule(batches: tuple[tuple[LayerTimes, ...], ...], occupied: float) -> Waits:
    program = _Program(len(batches))
    for layers in zip(*batches, strict=True):
        for batch, layer in enumerate(layers):
            program.attention(batch, layer)
        for batch, layer in enumerate(layers):
            program.experts(batch, layer)
    for batch in range(len(batches)):
        program.arrive(batch)
    played = play([program.main, *program.tasks], occupied)
    dispatch, combine = (played.waits.get(reason, 0.0) for reason in (DISPATCH, COMBINE))
    exchanges = [layer.exchange for layers in batches for layer in layers]
    dispatched, combined = sum(one.dispatch for one in exchanges), sum(one.combine for one in exchanges)
    return Waits(played.computed, dispatch, combine, played.slowed, dispatched, combined)


class _Program:
    """What the batches' main stream does, and the tasks of side streams, each with the transfers of one way."""

    def __init__(self, batches: int):
        self.main: list[Operation] = []
        self.tasks: list[list[Operation]] = []
        self._ends: list[list[Operation]] = [[] for _ in range(batches)]  # waits for what each batch has on its way
        self._started = 0

    def attention(self, batch: int, layer: LayerTimes) -> None:
        self.arrive(batch)
        self.main.append(Compute(layer.attention))
        for leg in self._starts("counts", layer.exchange.counts._asdict()):
            self.main += [leg, Wait(leg.key, DISPATCH)]
        self._send(batch, layer.exchange.there._asdict(), DISPATCH)
        self.main.append(Compute(layer.shared))

    def experts(self, batch: int, layer: LayerTimes) -> None:
        self.arrive(batch)
        self.main.append(Compute(layer.experts))
        back = layer.exchange.back
        self._send(batch, {"machine": back.machine, "rail": back.rail, "everyone": back.everyone}, COMBINE)

    def arrive(self, batch: int) -> None:
        """Waits for what is on its way."""
        self.main += self._ends[batch]
        self._ends[batch] = []

    def _send(self, batch: int, legs: Mapping[str, Transfer], reason: str) -> None:
        begin, end = ("begin", len(self.tasks)), ("end", len(self.tasks))
        task: list[Operation] = [Wait(begin)]
        for leg in self._starts("tokens", legs):
            task += [leg, Wait(leg.key)]
        self.main.append(Reach(begin))
        self.tasks.append([*task, Reach(end)])
        self._ends[batch] = [Wait(end, reason)]

    def _starts(self, kind: str, legs: Mapping[str, Transfer]) -> Iterator[Start]:
        """The transfers there are. Along rails and inside machines, counts and tokens have communicators of their own;
        that of all ranks carries both."""
        for name, leg in legs.items():
            if leg != NO_TRANSFER:
                self._started += 1
                communicator = name if name == "everyone" else (kind, name)
                yield Start(self._started, leg, communicator, self._started)
