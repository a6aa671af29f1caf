"""One rank of many, in one process: groups of the right size whose other ranks are made up.

A rank's work depends on its own tokens, on the number of the others' tokens and on the shapes that collectives return;
not on the values. So one device can run exactly the work of one rank of a run that needs many: it loads that rank's
weights, computes that rank's tokens, and gets a tensor of the right shape from each collective. Bytes are counted by
the same code as in a real group (`parallel/group.py`). The generated tokens mean nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from dsa_engine.kernels.runtime.integers import next_power_of_2
from dsa_engine.parallel.group import Group


@dataclass
class EmulatedGroup(Group):
    """A group of which only ``ranks[index]`` exists: collectives return copies of this rank's rows for all ranks."""

    _made: dict[tuple[Any, ...], torch.Tensor] = field(default_factory=dict)  # kept: CUDA graphs read them

    @property
    def alone(self) -> bool:
        return self.size == 1

    def _start_gather(
        self, rows: torch.Tensor, asynchronous: bool, into: torch.Tensor | None = None
    ) -> Callable[[], torch.Tensor]:
        gathered = self._gathered(rows)
        return lambda: gathered if into is None else into.copy_(gathered)

    def _gathered(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows of all ranks. Equal rows would have equal scores, and a selection among ties is other work: other ranks'
        floats have a factor, and their bytes, which are FP8 cache rows, other signs."""
        if rows.dtype in (torch.float32, torch.bfloat16, torch.float16):
            return (self._others(rows).view(-1, *[1] * rows.dim()) * rows).flatten(0, 1)
        gathered = rows.repeat(self.size, *[1] * (rows.dim() - 1))
        if rows.dtype == torch.uint8:
            gathered.view(self.size, len(rows), -1).bitwise_xor_(self._others(rows)[:, None])
        if rows.dtype == torch.int64:
            gathered.clamp_(min=0)  # negative numbers are error codes or invalid token ids
        return gathered

    def _others(self, rows: torch.Tensor) -> torch.Tensor:
        """Factors ``[size]``, 1 for this rank, or for bytes signs ``[size, bytes of a row]``, 0 for this rank."""
        key = (rows.dtype, rows.device, rows[0].numel() if rows.dtype == torch.uint8 else 0)
        if key not in self._made:
            away = (torch.arange(self.size, device=rows.device) - self.index) % self.size
            if rows.dtype == torch.uint8:
                column = torch.arange(key[2], device=rows.device)
                # Not in the last byte of a float32: scales stay positive.
                bit = torch.where(column % 4 < 3, (column // 4 * 3 + column % 4) % 9, 62)
                self._made[key] = ((away[:, None] >> bit) & 1).to(torch.uint8) << 7
            else:
                self._made[key] = (1 + away / (4 * self.size)).to(rows.dtype)
        return self._made[key]

    def _start_reduce(self, rows: torch.Tensor, asynchronous: bool) -> Callable[[], torch.Tensor]:
        part = rows.chunk(self.size)[self.index]
        # Only other ranks add to a row of zeros (of an embedding); work on zeros would be cheaper.
        reduced = torch.where(part == 0, self._made_up(part), part)
        return lambda: reduced

    def _made_up(self, like: torch.Tensor) -> torch.Tensor:
        """Different rows in the shape of ``like [R, n]``, as large as embeddings; they overlap in memory."""
        count = next_power_of_2(like.shape[0] + like.shape[1])
        key = ("numbers", like.dtype, like.device, count)
        if key not in self._made:
            numbers = torch.arange(count, device=like.device)
            self._made[key] = ((numbers * numbers * 0.618).sin() * 0.02).to(like.dtype)
        return self._made[key].unfold(0, like.shape[1], 1)[: like.shape[0]]

    def _exchange(self, rows: torch.Tensor, send: list[int] | None, receive: list[int] | None) -> torch.Tensor:
        count = rows.shape[0] if receive is None else sum(receive)
        if rows.shape[0] == 0:
            return rows.new_zeros(count, *rows.shape[1:])
        return rows[torch.arange(count, device=rows.device) % rows.shape[0]]

    def _start_exchange(
        self, rows: torch.Tensor, into: torch.Tensor, send: list[int], receive: list[int]
    ) -> Callable[[], None]:
        into.copy_(self._exchange(rows, send, receive))
        return lambda: None

    def _send(self, rows: torch.Tensor, to: int) -> None:
        pass

    def _recv(self, into: torch.Tensor, source: int) -> None:
        pass  # ``into`` keeps its values

    def _exchange_pairs(
        self, sends: Sequence[tuple[torch.Tensor, int]], receives: Sequence[tuple[torch.Tensor, int]]
    ) -> None:
        pass
