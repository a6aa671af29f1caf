"""Programs of a device's streams, played on modelled links: when each ends, and what the first one waits for.

A stream computes, starts transfers, and waits; its operations follow one another. The first stream is the main one.
Streams that compute at the same time share the device. A communicator carries one transfer after another, in the order
in which the host gives them to it, even if a later one could begin before. Transfers of different communicators run at
the same time, and share a link in equal parts as long as several of them have bytes for it. A transfer's latency holds
no link.

NCCL's kernels hold multiprocessors for as long as a transfer runs, so computation beside one may be slower.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from dsa_engine.parallel.links import NO_TRANSFER, Transfer

_NOTHING = 1e-13  # seconds; what rounding leaves


class Compute(NamedTuple):
    seconds: float


class Start(NamedTuple):
    """Starts a transfer; it reaches ``key`` when it ends. ``order`` is ascending in the order of the host."""

    key: Hashable
    transfer: Transfer
    communicator: Hashable
    order: Any


class Reach(NamedTuple):
    """The stream has come to ``key``."""

    key: Hashable


class Wait(NamedTuple):
    """Waits until ``key`` has been reached; ``reason`` is what the time is counted under."""

    key: Hashable
    reason: str = ""


Operation: TypeAlias = Compute | Start | Reach | Wait


@dataclass
class Played:
    """What the main stream spent, in seconds.

    Attributes:
        computed: its computation, if nothing else ran beside it.
        waits: by reason.
        slowed: what its computation lost to transfers and other streams.
    """

    computed: float = 0.0
    waits: dict[str, float] = field(default_factory=dict)
    slowed: float = 0.0

    @property
    def seconds(self) -> float:
        return self.computed + self.slowed + sum(self.waits.values())


def play(streams: Sequence[Sequence[Operation]], occupied: float = 0.0) -> Played:
    """Plays the programs of all streams until the main one, the first, has ended.

    Args:
        occupied: fraction of the device that running transfers take from computation.

    Raises:
        ValueError: the main stream waits for what no stream reaches.
    """
    device = _Device(streams)
    played = Played(sum(one.seconds for one in streams[0] if isinstance(one, Compute)))
    while (operation := device.main) is not None:
        running, computing = device.running, device.computing
        rate = (1 - occupied if running else 1.0) / max(1, len(computing))
        shared = _sharing(running.values())
        steps = [still / rate for still in computing.values()]
        steps += [seconds for one in running.values() for seconds in one.steps(shared)]
        if not steps:
            raise ValueError(f"the main stream waits for {operation!r}, which no stream reaches")
        step = min(steps)
        if isinstance(operation, Wait):
            played.waits[operation.reason] = played.waits.get(operation.reason, 0.0) + step
        else:
            played.slowed += step * (1 - rate)
        device.advance(step, rate, shared)
    return played


class _Running:
    """A transfer: on each link, seconds before its first byte, and seconds of its bytes if it had the link alone."""

    def __init__(self, start: Start):
        self.key = start.key
        self.latency, self.load = ([*each] for each in zip(*start.transfer, strict=True))

    def steps(self, shared: Sequence[int]) -> list[float]:
        """Seconds until the end of the latency, or of the bytes, on each link that is not done."""
        parts = zip(self.latency, self.load, shared, strict=True)
        return [latency or load * sharing for latency, load, sharing in parts if latency or load]

    def advance(self, step: float, shared: Sequence[int]) -> bool:
        """Whether it has ended ``step`` seconds later."""
        for link, sharing in enumerate(shared):
            if self.latency[link]:
                self.latency[link] = _less(self.latency[link], step)
            elif self.load[link]:
                self.load[link] = _less(self.load[link], step / sharing)
        return not any(self.latency) and not any(self.load)


def _sharing(running: Any) -> list[int]:
    """The number of transfers that have bytes for each link now."""
    shared = [0] * len(Transfer._fields)
    for one in running:
        for link, load in enumerate(one.load):
            shared[link] += bool(load and not one.latency[link])
    return shared


class _Device:
    """The state of all streams and communicators.

    Attributes:
        computing: seconds that are left of each stream's computation, by its number.
        running: the transfer that each communicator carries.
    """

    def __init__(self, streams: Sequence[Sequence[Operation]]):
        self.computing: dict[int, float] = {}
        self.running: dict[Hashable, _Running] = {}
        self._programs, self._next = streams, [0] * len(streams)
        self._reached: set[Hashable] = set()
        self._waiting: defaultdict[Hashable, list[int]] = defaultdict(list)  # streams, by what they wait for
        self._issued: dict[Hashable, Start] = {}
        starts = sorted(
            (one for program in streams for one in program if isinstance(one, Start)), key=lambda s: s.order
        )
        self._queues: defaultdict[Hashable, list[Hashable]] = defaultdict(list)  # keys of transfers, the last one first
        for one in reversed(starts):
            self._queues[one.communicator].append(one.key)
        for stream in range(len(streams)):
            self._go_on(stream)

    @property
    def main(self) -> Operation | None:
        """What the main stream is at; None: it has ended."""
        if 0 in self.computing:
            return self._programs[0][self._next[0] - 1]
        return self._programs[0][self._next[0]] if self._next[0] < len(self._programs[0]) else None

    def advance(self, step: float, rate: float, shared: Sequence[int]) -> None:
        """``step`` seconds pass, in which nothing ends but at their end."""
        ended = [key for key, one in self.running.items() if one.advance(step, shared)]
        for stream, seconds in [*self.computing.items()]:
            self.computing[stream] = _less(seconds, step * rate)
            if not self.computing[stream]:
                del self.computing[stream]
                self._go_on(stream)
        for communicator in ended:
            self._reach(self.running.pop(communicator).key)
            self._carry(communicator)

    def _go_on(self, stream: int) -> None:
        """Does what takes no time."""
        program = self._programs[stream]
        while self._next[stream] < len(program):
            operation = program[self._next[stream]]
            if isinstance(operation, Wait) and operation.key not in self._reached:
                self._waiting[operation.key].append(stream)
                return
            self._next[stream] += 1
            if isinstance(operation, Compute) and operation.seconds > _NOTHING:
                self.computing[stream] = operation.seconds
                return
            if isinstance(operation, Reach):
                self._reach(operation.key)
            elif isinstance(operation, Start):
                self._issued[operation.key] = operation
                self._carry(operation.communicator)

    def _reach(self, key: Hashable) -> None:
        self._reached.add(key)
        for stream in self._waiting.pop(key, ()):
            self._go_on(stream)

    def _carry(self, communicator: Hashable) -> None:
        """Begins the next transfer, if the communicator is free and has been given it."""
        queue = self._queues[communicator]
        while communicator not in self.running and queue and queue[-1] in self._issued:
            start = self._issued.pop(queue.pop())
            if start.transfer == NO_TRANSFER:
                self._reach(start.key)
            else:
                self.running[communicator] = _Running(start)


def _less(seconds: float, step: float) -> float:
    still = seconds - step
    return still if still > _NOTHING else 0.0
