"""A process group and the collectives that the engine uses, on flat tensors whose first dimension is rows.

A group of one rank needs no process group: every collective is then the identity, so that one program serves one
process and many. All of them work on NCCL and on Gloo.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

# PyTorch 2.13 renamed these two and warns of the old names, which are all that 2.11 and 2.12 have.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass
class Group:
    """``ranks`` in order; this process is ``ranks[index]``."""

    ranks: tuple[int, ...]
    index: int
    handle: dist.ProcessGroup | None  # None: alone
    bytes_sent: int = 0  # payload that this rank has put into collectives

    @property
    def size(self) -> int:
        return len(self.ranks)

    def all_gather_async(self, rows: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Starts gathering ``rows [R, ...]``, R the same on every rank.

        Returns:
            a function that waits and returns ``[size · R, ...]``.
        """
        if self.handle is None:
            return lambda: rows
        rows = rows.contiguous()
        self.bytes_sent += rows.nbytes * (self.size - 1)
        gathered = rows.new_empty(self.size * rows.shape[0], *rows.shape[1:])
        work = _all_gather(gathered, rows, group=self.handle, async_op=True)

        def wait() -> torch.Tensor:
            work.wait()
            return gathered

        return wait

    def all_gather(self, rows: torch.Tensor) -> torch.Tensor:
        """``[R, ...]`` of every rank, in rank order: ``[size · R, ...]``."""
        return self.all_gather_async(rows)()

    def reduce_scatter(self, rows: torch.Tensor) -> torch.Tensor:
        """Sums ``rows [size · R, ...]`` over the ranks and leaves each its own part ``[R, ...]``."""
        if self.handle is None:
            return rows
        rows = rows.contiguous()
        part = rows.new_empty(rows.shape[0] // self.size, *rows.shape[1:])
        self.bytes_sent += part.nbytes * (self.size - 1)
        _reduce_scatter(part, rows, group=self.handle)
        return part

    def all_to_all(
        self, rows: torch.Tensor, send: list[int] | None = None, receive: list[int] | None = None
    ) -> torch.Tensor:
        """Sends ``rows`` in rank order, ``send[i]`` of them to rank i; returns what came, ``receive[i]`` from rank i.

        Without counts every rank sends and gets equal parts.
        """
        if self.handle is None:
            return rows
        rows = rows.contiguous()
        arrived = rows.new_empty(rows.shape[0] if receive is None else sum(receive), *rows.shape[1:])
        kept = rows.shape[0] // self.size if send is None else send[self.index]
        self.bytes_sent += rows[kept:].nbytes
        dist.all_to_all_single(arrived, rows, receive, send, group=self.handle)
        return arrived
