"""Programs of a device's streams, played on modelled links: when each ends, and what the first one waits for.

A stream computes, starts transfers, and waits; its operations follow one another. The first stream is the main one.
Streams that compute at the same time share the device. A communicator carries one transfer after another, in the order
in which they are started. Transfers of different communicators run at the same time, and share a link in equal parts as
long as several of them have bytes for it. A transfer's latency holds no link.

NCCL's kernels hold multiprocessors for as long as a transfer runs, so computation beside one may be slower.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from dsa_engine.parallel.links import Transfer

_NOTHING = 1e-13  # seconds; what rounding leaves


class Compute(NamedTuple):
    seconds: float


class Start(NamedTuple):
    """Starts a transfer; it reaches ``key`` when it ends."""

    key: Hashable
    transfer: Transfer
    communicator: Hashable


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
    main = device.streams[0]
    while True:
        device.issue()
        if main.ended:
            return played
        running = device.running()
        computing = [stream for stream in device.streams if stream.left]
        rate = (1 - occupied if running else 1.0) / max(1, len(computing))
        step = min((*(stream.left / rate for stream in computing), *_next_ends(running)), default=None)
        if step is None:
            raise ValueError(f"the main stream waits for {main.waits_for!r}, which no stream reaches")
        if main.left:
            played.slowed += step * (1 - rate)
        else:
            assert isinstance(main.waits_for, Wait)
            reason = main.waits_for.reason
            played.waits[reason] = played.waits.get(reason, 0.0) + step
        for stream in computing:
            stream.left = _less(stream.left, step * rate)
        _advance(running, step)


@dataclass
class _Running:
    """A transfer: on each link, seconds before its first byte, and seconds of its bytes if it had the link alone."""

    key: Hashable
    latency: list[float]
    load: list[float]

    @property
    def ended(self) -> bool:
        return not any(self.latency) and not any(self.load)


class _Stream:
    def __init__(self, program: Sequence[Operation]):
        self.program = program
        self.next = 0
        self.left = 0.0  # seconds of the present computation

    @property
    def ended(self) -> bool:
        return not self.left and self.next == len(self.program)

    @property
    def waits_for(self) -> Operation | None:
        return self.program[self.next] if self.next < len(self.program) else None


class _Device:
    def __init__(self, streams: Sequence[Sequence[Operation]]):
        self.streams = [_Stream(program) for program in streams]
        self._queues: dict[Hashable, deque[_Running]] = {}  # by communicator
        self._reached: set[Hashable] = set()

    def issue(self) -> None:
        """Does everything that takes no time."""
        moved = True
        while moved:
            moved = False
            for stream in self.streams:
                moved |= self._issue(stream)
            for queue in self._queues.values():
                while queue and queue[0].ended:
                    self._reached.add(queue.popleft().key)
                    moved = True

    def running(self) -> list[_Running]:
        return [queue[0] for queue in self._queues.values() if queue]

    def _issue(self, stream: _Stream) -> bool:
        before = stream.next
        while not stream.left and stream.next < len(stream.program):
            operation = stream.program[stream.next]
            if isinstance(operation, Wait):
                if operation.key not in self._reached:
                    break
            elif isinstance(operation, Compute):
                stream.left = operation.seconds
            elif isinstance(operation, Reach):
                self._reached.add(operation.key)
            else:
                latency, load = ([*each] for each in zip(*operation.transfer, strict=True))
                queue = self._queues.setdefault(operation.communicator, deque())
                queue.append(_Running(operation.key, latency, load))
            stream.next += 1
        return stream.next > before


def _next_ends(running: Sequence[_Running]) -> list[float]:
    """Seconds until the next end of a latency or of a load."""
    shared = _sharing(running)
    ends = []
    for one in running:
        for link, sharing in enumerate(shared):
            if one.latency[link]:
                ends.append(one.latency[link])
            elif one.load[link]:
                ends.append(one.load[link] * sharing)
    return ends


def _advance(running: Sequence[_Running], step: float) -> None:
    shared = _sharing(running)
    for one in running:
        for link, sharing in enumerate(shared):
            if one.latency[link]:
                one.latency[link] = _less(one.latency[link], step)
            elif one.load[link]:
                one.load[link] = _less(one.load[link], step / sharing)


def _sharing(running: Sequence[_Running]) -> list[int]:
    """The number of transfers that have bytes for each link now."""
    return [sum(1 for one in running if one.load[link] and not one.latency[link]) for link in range(len(Transfer()))]


def _less(seconds: float, step: float) -> float:
    left = seconds - step
    return left if left > _NOTHING else 0.0
