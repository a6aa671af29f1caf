"""A process group and the collectives that the engine uses, on flat tensors whose first dimension is rows.

Ranks are numbered in their mesh, from 0; only the process group knows PyTorch's own numbers.

A group of one rank needs no process group: every collective is then the identity, so that one program serves one
process and many. All collectives work on NCCL and on Gloo.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property, partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from dsa_engine.kernels.runtime.kernel import as_one, call, this_thread
from dsa_engine.parallel.agreement import Meeting

Result = TypeVar("Result")
_groups_made = 0  # by :func:`new_group`, with this process in them

# PyTorch 2.13 renamed these two and warns of the old names, which are all that 2.11 and 2.12 have.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def new_group(
    ranks: Sequence[int], timeout: float, backend: str | None = None, options: Any = None, alone: bool = False
) -> dist.ProcessGroup:
    """A process group of ``ranks`` of the run; only these call this if ``alone``, else all ranks of the run do."""
    global _groups_made
    limit = timedelta(seconds=timeout)
    if options is not None:
        options._timeout = limit  # else PyTorch warns that it replaces it
    group = dist.new_group(ranks, timeout=limit, backend=backend, pg_options=options, use_local_synchronization=alone)
    _groups_made += isinstance(group, dist.ProcessGroup)
    return group


def agree_on_names(ranks: Sequence[int], rank: int, timeout: float) -> None:
    """Lets the next groups that these ranks make alone have the same names on all of them; all of them call it.

    PyTorch names such a group by its ranks and the number of groups that a process is in. After an engine with
    ``prefill_ranks`` this number differs: a leader is in more groups than other ranks of its part. So ranks that are in
    fewer make groups of one rank.
    """
    largest = Meeting(ranks, rank).hold(str(_groups_made), lambda made: max(made.values(), key=int), timeout)
    while _groups_made < int(largest):
        new_group([rank], timeout, "gloo", alone=True)


@dataclass
class Group:
    """``ranks`` in order; this process is ``ranks[index]``."""

    ranks: tuple[int, ...]
    index: int
    handle: dist.ProcessGroup | None  # None: alone
    bytes_sent: int = 0  # payload of this rank in collectives

    @cached_property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def alone(self) -> bool:
        return self.handle is None

    def all_gather_async(self, rows: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Starts :meth:`all_gather`; returns a function that waits and returns the rows."""
        return partial(as_one, call, this_thread.as_one(self._gather, rows, True))

    def all_gather(self, rows: torch.Tensor) -> torch.Tensor:
        """``rows [R, ...]`` of every rank, R the same on each, in rank order: ``[size · R, ...]``."""
        gathered: torch.Tensor = this_thread.as_one(lambda rows: self._gather(rows, asynchronous=False)(), rows)
        return gathered

    def reduce_scatter(self, rows: torch.Tensor) -> torch.Tensor:
        """Sums ``rows [size · R, ...]`` over the ranks; each rank gets its part ``[R, ...]``."""
        return self._reduce(rows, asynchronous=False)()

    def reduce_scatter_async(self, rows: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Starts :meth:`reduce_scatter`; ``rows`` stay as they are until the wait. Returns a function that waits and
        returns this rank's part."""
        return self._reduce(rows, asynchronous=True)

    def all_to_all(
        self, rows: torch.Tensor, send: list[int] | None = None, receive: list[int] | None = None
    ) -> torch.Tensor:
        """Sends ``rows`` in rank order, ``send[i]`` of them to rank i; returns the received rows, ``receive[i]`` from
        rank i. Without counts all parts are equal."""
        if self.alone:
            return rows
        self.bytes_sent += self._bytes_to_others(rows, send)
        return self._exchange(rows.contiguous(), send, receive)

    def all_to_all_async(
        self, rows: torch.Tensor, into: torch.Tensor, send: list[int], receive: list[int]
    ) -> Callable[[], None]:
        """Starts to send ``rows`` in rank order, ``send[i]`` of them to rank i, and to fill ``into`` with
        ``receive[i]`` rows of each rank i. Both are contiguous, and stay as they are until the wait. Returns a function
        that waits until ``into`` is filled."""
        if self.alone:
            into.copy_(rows)
            return lambda: None
        self.bytes_sent += self._bytes_to_others(rows, send)
        return self._start_exchange(rows, into, send, receive)

    def broadcast_async(self, rows: torch.Tensor) -> Callable[[], None]:
        """Starts filling ``rows``, contiguous and of the same shape on every rank, with those of the first rank of the
        group. Returns a function that waits until they have come."""
        if self.alone:
            return lambda: None
        self.bytes_sent += rows.nbytes * (self.size - 1) if self.index == 0 else 0
        work = dist.broadcast(rows, group=self.handle, group_src=0, async_op=True)
        return lambda: work.wait() and None

    def all_gather_object(self, value: Result) -> list[Result]:
        """Every rank's ``value``, which is pickled; for groups on the CPU."""
        every = [value] * self.size
        if not self.alone:
            dist.all_gather_object(every, value, group=self.handle)
        return every

    def send(self, rows: torch.Tensor, to: int) -> None:
        """Sends ``rows`` of any shape to the rank with the index ``to`` in this group, which calls :meth:`recv`."""
        self._check_peer(to)
        self.bytes_sent += rows.nbytes
        self._send(rows.contiguous(), to)

    def recv(self, into: torch.Tensor, source: int) -> torch.Tensor:
        """Fills the contiguous tensor ``into``, and returns it, with what the rank with the index ``source`` sends."""
        self._check_peer(source)
        self._recv(into, source)
        return into

    def recv_any(self, into: torch.Tensor) -> int:
        """Fills a contiguous tensor on the CPU with what any other rank of the group sends next; returns the index of
        that rank."""
        assert self.handle is not None
        return dist.get_group_rank(self.handle, dist.recv(into, group=self.handle))

    def exchange(self, sends: Sequence[tuple[torch.Tensor, int]], receives: Sequence[tuple[torch.Tensor, int]]) -> None:
        """Sends tensors to other ranks and fills tensors with what they send, all at once; each with the index of the
        other rank in this group. All are contiguous, and a rank names another one's tensors in the order in which that
        rank sends them."""
        self.bytes_sent += sum(rows.nbytes for rows, _ in sends)
        if sends or receives:
            self._exchange_pairs(sends, receives)

    def _check_peer(self, peer: int) -> None:
        if peer == self.index or not 0 <= peer < self.size:
            raise ValueError(f"{peer} is no other rank of a group of {self.size} in which this is {self.index}")

    def _bytes_to_others(self, rows: torch.Tensor, send: list[int] | None = None) -> int:
        if send is None:
            return rows.nbytes // self.size * (self.size - 1)
        return rows.element_size() * math.prod(rows.shape[1:]) * (sum(send) - send[self.index])

    def _gather(self, rows: torch.Tensor, asynchronous: bool) -> Callable[[], torch.Tensor]:
        if self.alone:
            return lambda: rows
        rows = rows.contiguous()
        self.bytes_sent += rows.nbytes * (self.size - 1)
        return self._start_gather(rows, asynchronous)

    def _reduce(self, rows: torch.Tensor, asynchronous: bool) -> Callable[[], torch.Tensor]:
        if self.alone:
            return lambda: rows
        rows = rows.contiguous()
        self.bytes_sent += self._bytes_to_others(rows)
        return self._start_reduce(rows, asynchronous)

    # The transport; a subclass may have another one.

    def _start_gather(self, rows: torch.Tensor, asynchronous: bool) -> Callable[[], torch.Tensor]:
        gathered = rows.new_empty(self.size * rows.shape[0], *rows.shape[1:])
        # Without async_op NCCL takes the current stream, which saves two events.
        work = _all_gather(gathered, rows, group=self.handle, async_op=asynchronous)
        return lambda: _waited(work, gathered)

    def _start_reduce(self, rows: torch.Tensor, asynchronous: bool) -> Callable[[], torch.Tensor]:
        part = rows.new_empty(rows.shape[0] // self.size, *rows.shape[1:])
        work = _reduce_scatter(part, rows, group=self.handle, async_op=asynchronous)
        return lambda: _waited(work, part)

    def _exchange(self, rows: torch.Tensor, send: list[int] | None, receive: list[int] | None) -> torch.Tensor:
        arrived = rows.new_empty(rows.shape[0] if receive is None else sum(receive), *rows.shape[1:])
        dist.all_to_all_single(arrived, rows, receive, send, group=self.handle)
        return arrived

    def _start_exchange(
        self, rows: torch.Tensor, into: torch.Tensor, send: list[int], receive: list[int]
    ) -> Callable[[], None]:
        work = dist.all_to_all_single(into, rows, receive, send, group=self.handle, async_op=True)
        return lambda: work.wait() and None

    def _send(self, rows: torch.Tensor, to: int) -> None:
        dist.send(rows, group=self.handle, group_dst=to)

    def _recv(self, into: torch.Tensor, source: int) -> None:
        work = dist.irecv(into, group=self.handle, group_src=source)
        if work is not None:
            work.wait()

    def _exchange_pairs(
        self, sends: Sequence[tuple[torch.Tensor, int]], receives: Sequence[tuple[torch.Tensor, int]]
    ) -> None:
        operations = [dist.P2POp(dist.isend, rows, None, self.handle, group_peer=peer) for rows, peer in sends]
        operations += [dist.P2POp(dist.irecv, rows, None, self.handle, group_peer=peer) for rows, peer in receives]
        for work in dist.batch_isend_irecv(operations):
            work.wait()


def _waited(work: dist.Work | None, result: torch.Tensor) -> torch.Tensor:
    if work is not None:
        work.wait()
    return result
