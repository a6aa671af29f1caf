"""Time of MoE layers whose tokens travel under other computation: one batch, or two that pass the layers in turn.

One device computes, and one link carries collectives, in the order in which they are issued. A layer is attention and
gate, a dispatch, the experts, and a combine; the shared expert runs beside the dispatch. With one batch it hides at
most that. With two batches, each stage of the first batch is followed by the same stage of the second::

    compute   a1 s1 a2 s2 e1 e2 a1' s1' a2' …
    links        d1    d2    c1  c2 …

A collective of one batch then travels under the computation of the other. NCCL's kernels hold multiprocessors for as
long as a collective runs, so computation beside one is slower.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple


class LayerTimes(NamedTuple):
    """Seconds of one batch in one layer; a dense layer has attention and its MLP in ``attention`` and zeros else."""

    attention: float  # with everything else before the dispatch
    dispatch: float
    shared: float
    experts: float
    combine: float


@dataclass
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


class _Clock:
    """The time at which computation and collectives end, as they are issued."""

    def __init__(self, occupied: float):
        self.waits = Waits()
        self._occupied = occupied
        self._now = self._linked = 0.0

    def compute(self, seconds: float) -> None:
        beside = max(0.0, self._linked - self._now)  # a collective runs for so long from now on
        rate = 1 - self._occupied
        slowed = (seconds / rate if seconds <= beside * rate else seconds + beside * self._occupied) - seconds
        self.waits.computed += seconds
        self.waits.slowed += slowed
        self._now += seconds + slowed

    def start(self, seconds: float) -> float:
        """Starts a collective; returns its end."""
        self._linked = max(self._now, self._linked) + seconds
        return self._linked

    def wait(self, end: float) -> float:
        """Waits for a collective's end; returns the seconds."""
        waited = max(0.0, end - self._now)
        self._now += waited
        return waited


def schedule(batches: Sequence[Sequence[LayerTimes]], occupied: float) -> Waits:
    """The layers of one batch or of several that pass them in turn.

    Args:
        batches: the layers of each batch.
        occupied: fraction of the device that a running collective takes from computation.
    """
    clock = _Clock(occupied)
    waits = clock.waits
    combined = [0.0] * len(batches)  # ends of the last combines
    for layers in zip(*batches, strict=True):
        dispatched = []
        for number, layer in enumerate(layers):
            waits.combine += clock.wait(combined[number])
            clock.compute(layer.attention)
            waits.dispatched += layer.dispatch
            dispatched.append(clock.start(layer.dispatch) if layer.dispatch else 0.0)
            clock.compute(layer.shared)
        for number, layer in enumerate(layers):
            waits.dispatch += clock.wait(dispatched[number])
            clock.compute(layer.experts)
            waits.combined += layer.combine
            combined[number] = clock.start(layer.combine) if layer.combine else 0.0
    for end in combined:
        waits.combine += clock.wait(end)
    return waits
