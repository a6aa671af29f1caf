"""Ranks whose streams lie on a few hardware queues, as CUDA's do: what waits at the head of a queue blocks all that is
behind it, of other streams too. Hosts are threads of this process; nothing is computed."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict, deque
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch

_HANGS_S = 30.0  # after which a host that waits gives up
POOL = 32  # streams that PyTorch hands out, round robin


class Recorded:
    """An event, for hosts and streams that wait for it."""

    def __init__(self, device: Device):
        self._device = device
        self.passed = threading.Event()

    def record(self) -> None:
        self._device.put(self)

    def query(self) -> bool:
        return self.passed.is_set()

    def synchronize(self) -> None:
        if not self.passed.wait(_HANGS_S):
            raise RuntimeError("the device hangs")


class Wait(NamedTuple):
    """A stream waits for an event."""

    event: Recorded


class Meeting(NamedTuple):
    """A kernel of NCCL, which ends when all its ranks have begun it."""

    key: Hashable
    ranks: int
    pages: bool = False  # whether it is a message with pages


class Queues:
    """The queues of all ranks, ``number`` on each.

    Attributes:
        held: maximum number of messages of pages that have waited on a rank's device for their other side at once.
    """

    def __init__(self, number: int):
        self._number = number
        self._lock = threading.Lock()
        self._queues: defaultdict[int, defaultdict[int, deque[Recorded | Wait | Meeting]]] = defaultdict(
            lambda: defaultdict(deque)
        )
        self._begun: defaultdict[Hashable, set[int]] = defaultdict(set)
        self.held: Counter[int] = Counter()

    @property
    def empty(self) -> bool:
        with self._lock:
            return not any(queue for queues in self._queues.values() for queue in queues.values())

    def put(self, rank: int, stream: int, what: Recorded | Wait | Meeting) -> None:
        with self._lock:
            self._queues[rank][stream % POOL % self._number].append(what)
            ranks = {rank}
            while ranks:
                ranks = {other for one in ranks for other in self._run(one)}
            waiting = [queue[0] for queue in self._queues[rank].values() if queue]
            pages = sum(isinstance(one, Meeting) and one.pages for one in waiting)
            self.held[rank] = max(self.held[rank], pages)

    def _run(self, rank: int) -> set[int]:
        """Runs what can run on a rank; returns the ranks that may go on as it has."""
        others, moved = set[int](), True
        while moved:
            moved = False
            for queue in self._queues[rank].values():
                while queue and self._ends(rank, queue[0], others):
                    queue.popleft()
                    moved = True
        return others - {rank}

    def _ends(self, rank: int, what: Recorded | Wait | Meeting, others: set[int]) -> bool:
        if isinstance(what, Recorded):
            what.passed.set()
        elif isinstance(what, Wait):
            return what.event.passed.is_set()
        else:
            self._begun[what.key].add(rank)
            if len(self._begun[what.key]) < what.ranks:
                return False
            others |= self._begun[what.key]
        return True


class Device:
    """The device of a rank; stands for ``torch.cuda``. Stream 0 is the default one.

    Args:
        in_order: a kernel of NCCL begins when those that the host launched before have ended, whatever their
            communicator: as with NCCL_LAUNCH_ORDER_IMPLICIT in graphs, and before CUDA 12.3. Threads may not race then.
    """

    def __init__(self, queues: Queues, rank: int, in_order: bool = False):
        self._queues, self.rank, self._in_order = queues, rank, in_order
        self._streams, self._current = 0, threading.local()
        self._last: Recorded | None = None  # the end of the last kernel of NCCL

    def Stream(self, *_: object) -> int:
        self._streams += 1
        return self._streams

    def Event(self) -> Recorded:
        return Recorded(self)

    @contextmanager
    def stream(self, stream: int) -> Iterator[None]:
        before, self._current.stream = self._stream, stream
        yield
        self._current.stream = before

    @property
    def _stream(self) -> int:
        return getattr(self._current, "stream", 0)

    def put(self, what: Recorded | Wait | Meeting) -> None:
        """Gives the current stream something to do."""
        self._queues.put(self.rank, self._stream, what)

    def follow(self, stream: int, meeting: Meeting) -> None:
        """Lets a stream run a kernel of NCCL after the current one, which then waits for it."""
        begun, ended = Recorded(self), Recorded(self)
        begun.record()
        with self.stream(stream):
            self.put(Wait(begun))
            if self._in_order:
                if self._last is not None:
                    self.put(Wait(self._last))
                self._last = ended
            self.put(meeting)
            ended.record()
        self.put(Wait(ended))


class HostGroup:
    """Words between hosts."""

    def __init__(self, rank: int, words: defaultdict[tuple[int, int], SimpleQueue[torch.Tensor]]):
        self._rank, self._words = rank, words

    def send(self, word: torch.Tensor, to: int) -> None:
        self._words[self._rank, to].put(word.clone())

    def recv(self, word: torch.Tensor, source: int) -> torch.Tensor:
        return word.copy_(self._words[source, self._rank].get(timeout=_HANGS_S))


class DeviceGroup:
    """One communicator of all ranks."""

    def __init__(self, device: Device):
        self._device, self._stream = device, device.Stream()
        self._messages: Counter[tuple[int, int]] = Counter()

    def exchange(self, sends: Sequence[Any], receives: Sequence[Any]) -> None:
        for own, others in ((True, sends), (False, receives)):
            for _, other in others:
                pair = (self._device.rank, other) if own else (other, self._device.rank)
                self._messages[pair] += 1
                self._device.follow(self._stream, Meeting((*pair, self._messages[pair]), 2, pages=True))
