"""The rows of a flat batch: segments, which are consecutive tokens of one sequence; and the slots of their positions,
which are the rows of a paged pool that hold the sequence.

Bits: exact.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
import triton.language as tl

from dsa_engine.kernels.runtime import cpu
from dsa_engine.kernels.runtime.integers import cdiv, next_power_of_2
from dsa_engine.kernels.runtime.kernel import kernel
from dsa_engine.kernels.runtime.launch import runs_triton
from dsa_engine.kernels.runtime.operation import operation
from dsa_engine.kernels.runtime.transfer import upload

_LOOKED_UP, _WARPS = 2048, 4  # positions of a program of slots_of_kernel


class Segment(NamedTuple):
    """``length`` consecutive query tokens of one sequence, lying at rows ``row …`` of the flat batch.

    The token at row ``row + i`` has position ``start + i`` and sees the ``start + i + 1`` tokens up to itself.
    """

    row: int
    length: int
    sequence: int  # row of the block table
    start: int

    @property
    def end(self) -> int:
        """Tokens that the last query sees."""
        return self.start + self.length

    @property
    def visible_pairs(self) -> int:
        """Query-key pairs under the causal mask."""
        return self.length * self.start + self.length * (self.length + 1) // 2


@dataclass(frozen=True)
class Segments:
    """The segments of a batch, one after the other from row 0: on the host, for loops and launch sizes, and the same
    per row on the device, for kernels."""

    segments: tuple[Segment, ...]
    sequences: torch.Tensor  # [rows] int32, each row's row of the block table
    visible: torch.Tensor  # [rows] int32, the number of tokens that each row sees: its position + 1
    _tiles: dict[int, torch.Tensor] = field(default_factory=dict, compare=False, repr=False)
    _parts: dict[tuple[int, int], Segments] = field(default_factory=dict, compare=False, repr=False)
    _checked: set[tuple[torch.Size, int]] = field(default_factory=set, compare=False, repr=False)

    @classmethod
    def of(cls, segments: Iterable[Segment], device: torch.device | str = "cpu") -> Segments:
        """Raises ``ValueError`` where a segment is empty or does not begin where the one before ends."""
        segments = tuple(segments)
        rows = 0
        for s in segments:
            if s.row != rows or s.length < 1:
                raise ValueError(f"{s} must have a length and begin at row {rows}, where the segment before it ends")
            rows += s.length
        if rows == len(segments):  # a row each, as in decode
            columns = [[s.sequence for s in segments], [s.end for s in segments]]
            sequences, visible = torch.tensor(columns, dtype=torch.int32)
        else:
            row, length, sequence, start = torch.tensor(segments, dtype=torch.int32).view(-1, 4).T
            sequences, before = torch.stack((sequence, start - row)).repeat_interleave(length, dim=1)
            visible = before + torch.arange(1, rows + 1, dtype=torch.int32)
        return cls(segments, upload(sequences, device), upload(visible, device))

    def __iter__(self) -> Iterator[Segment]:
        return iter(self.segments)

    def __len__(self) -> int:
        return len(self.segments)

    @property
    def rows(self) -> int:
        return self.visible.shape[0]

    @cached_property
    def contexts(self) -> dict[int, int]:
        """By sequence: the number of tokens that its rows see."""
        return {s.sequence: s.end for s in sorted(self.segments, key=lambda s: s.end)}

    @cached_property
    def longest(self) -> int:
        """Largest number of tokens that a row sees; 0 without rows."""
        return max((s.end for s in self.segments), default=0)

    @cached_property
    def max_length(self) -> int:
        """Largest number of rows of a segment."""
        return max((s.length for s in self.segments), default=0)

    def part(self, first: int, last: int) -> Segments:
        """The rows ``first … last-1``, numbered from 0; on the device these are views. The same object each time, with
        its tiles, so that layers after the first copy nothing to the device."""
        if (first, last) == (0, self.rows):
            return self
        if (first, last) not in self._parts:
            self._parts[first, last] = self._part(first, last)
        return self._parts[first, last]

    def _part(self, first: int, last: int) -> Segments:
        segments = []
        for s in self.segments:
            begin, end = max(s.row, first), min(s.row + s.length, last)
            if begin < end:
                segments.append(Segment(begin - first, end - begin, s.sequence, s.start + begin - s.row))
        return Segments(tuple(segments), self.sequences[first:last], self.visible[first:last])

    def tiles(self, size: int) -> torch.Tensor:
        """int32 ``[tiles, 2]`` on the device: first row and row count of tiles of at most ``size`` rows, none of which
        crosses a segment. Made once."""
        if size not in self._tiles:
            tiles = [
                (s.row + done, min(size, s.length - done)) for s in self.segments for done in range(0, s.length, size)
            ]
            self._tiles[size] = upload(torch.tensor(tiles, dtype=torch.int32).view(-1, 2), self.visible.device)
        return self._tiles[size]

    def check(self, rows: int, block_tables: torch.Tensor, page_size: int) -> None:
        """Raises ``ValueError`` unless these are ``rows`` rows, each within its block table."""
        if self.rows != rows:
            raise ValueError(f"the segments have {self.rows} rows, the batch has {rows}")
        if (block_tables.shape, page_size) in self._checked:
            return
        for s in self.segments:
            if not 0 <= s.sequence < block_tables.shape[0]:
                raise ValueError(f"{s} names a sequence outside of the block table with {block_tables.shape[0]} rows")
            if s.start < 0 or s.end > block_tables.shape[1] * page_size:
                raise ValueError(
                    f"{s} ends at token {s.end}, its block table holds {block_tables.shape[1]} pages of "
                    f"{page_size} tokens"
                )
        self._checked.add((block_tables.shape, page_size))


def local_visible(
    positions: torch.Tensor, page_index: torch.Tensor, sequences: torch.Tensor, page_size: int
) -> torch.Tensor:
    """The number of tokens that each row sees on this rank, int32 ``[rows]``, where a sequence's pages lie on several:
    always its first ones there. PyTorch's operations do: once a step, not once a layer.

    Args:
        positions: integer ``[rows]`` in their sequences; −1 for padding, which sees nothing.
        page_index: int32 ``[sequences, local pages]``, each page's number in its sequence, ascending; 2**25 after the
            last.
        sequences: integer ``[rows]``, the row of the page index for each.
    """
    # int64: the first token of page 2**25 would be beyond int32.
    seen = positions.long()[:, None] + 1 - page_index.index_select(0, sequences).long() * page_size
    return seen.clamp_(0, page_size).sum(dim=1, dtype=torch.int32)


@dataclass(frozen=True)
class CuSeqlens:
    """The rows of a flat tensor that belong to each sequence of a varlen call: rows ``offsets[i] … offsets[i+1]-1`` are
    the i-th's."""

    offsets: tuple[int, ...]  # n + 1 of them, from 0
    on_device: torch.Tensor  # the same, int32
    longest: int  # largest number of rows of a sequence

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device | str = "cpu") -> CuSeqlens:
        """The offsets of sequences with these numbers of rows, one after the other."""
        offsets = (0, *accumulate(lengths))
        on_device = upload(torch.tensor(offsets, dtype=torch.int32), device)
        return cls(offsets, on_device, max(lengths, default=0))

    @property
    def rows(self) -> int:
        return self.offsets[-1]

    def part(self, first: int, last: int) -> CuSeqlens:
        """The sequences ``first … last-1``, with their rows numbered from 0."""
        begin, *others = self.offsets[first : last + 1]
        offsets = (0, *(offset - begin for offset in others))
        longest = max((b - a for a, b in pairwise(offsets)), default=0)
        return CuSeqlens(offsets, self.on_device[first : last + 1] - begin, longest)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """First row of each sequence, and the one after its last."""
        return pairwise(self.offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1


class Paging(NamedTuple):
    """The arguments of :func:`slots_of` after the positions, for operations that give slots instead of positions."""

    block_tables: torch.Tensor  # [sequences, max_pages] int32
    sequences: torch.Tensor  # [T], the row of the block tables for each
    page_size: int


def slots_of_reference(
    positions: torch.Tensor, block_tables: torch.Tensor, sequences: torch.Tensor, page_size: int
) -> torch.Tensor:
    known = positions >= 0
    at = positions.clamp(min=0).long()
    first_page = sequences.long() * block_tables.shape[1]
    pages = block_tables.flatten()[first_page.view(-1, *(1,) * (positions.dim() - 1)) + at // page_size]
    return torch.where(known, pages * page_size + at % page_size, -1).int()


@kernel(do_not_specialize=["count"])
def slots_of_kernel(
    positions, tables, sequences, slots, count, per_row, table_stride,
    PAGE_SIZE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """A tile of ``positions [count, per_row]`` a program."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    table = tables + tl.load(sequences + row, mask=row < count, other=0).to(tl.int64) * table_stride
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = (row < count)[:, None] & (column < per_row)
    at = row[:, None] * per_row + column
    position = tl.load(positions + at, mask=inside, other=-1)
    known = position >= 0
    page = tl.load(table[:, None] + position // PAGE_SIZE, mask=known, other=0)
    slot = tl.where(known, page * PAGE_SIZE + position % PAGE_SIZE, -1)
    tl.store(slots + at, slot.to(tl.int32), mask=inside)


def _slots_of_native(
    positions: torch.Tensor, block_tables: torch.Tensor, sequences: torch.Tensor, page_size: int
) -> torch.Tensor:
    """Runs ``cpu/rows.cpp``; all tensors are int32."""
    positions, tables, sequences = positions.contiguous(), block_tables.contiguous(), sequences.contiguous()
    slots = torch.empty_like(positions)
    rows, columns = positions.shape[0], math.prod(positions.shape[1:])
    outside = cpu.kernels().dsa_slots_of(
        positions.data_ptr(), tables.data_ptr(), sequences.data_ptr(), slots.data_ptr(), rows, columns,
        *tables.shape, tables.stride(0), page_size, cpu.row_threads(positions.numel()),
    )  # fmt: skip
    if outside:
        raise IndexError(f"positions or sequences lie outside of the block tables {list(tables.shape)}")
    return slots


@operation(runs=lambda positions: runs_triton(positions) or cpu.serves(positions, dtype=torch.int32))
def slots_of(
    positions: torch.Tensor, block_tables: torch.Tensor, sequences: torch.Tensor, page_size: int
) -> torch.Tensor:
    """Finds the slots of positions in the pool.

    Args:
        positions: integer ``[T, ...]``; −1 stays −1.
        block_tables: ``[sequences, max_pages]`` int32.
        sequences: integer ``[T]``, the row of the block tables for each.

    Returns:
        int32, shaped like ``positions``.

    Raises:
        IndexError: a position or sequence outside of the block tables, where the CPU's kernel runs; no other looks.
    """
    if positions.shape[0] != sequences.shape[0]:
        raise ValueError(f"{positions.shape[0]} rows of positions, but {sequences.shape[0]} sequence numbers")
    if cpu.serves(positions, block_tables, sequences, dtype=torch.int32):
        return _slots_of_native(positions, block_tables, sequences, page_size)
    if not runs_triton(positions):
        return slots_of_reference(positions, block_tables, sequences, page_size)
    slots = torch.empty(positions.shape, dtype=torch.int32, device=positions.device)
    if slots.numel():
        count, per_row = positions.shape[0], math.prod(positions.shape[1:])
        columns = min(next_power_of_2(per_row), _LOOKED_UP)
        rows = _LOOKED_UP // columns
        slots_of_kernel[(cdiv(count, rows), cdiv(per_row, columns))](
            positions.contiguous(), block_tables.contiguous(), sequences.contiguous(), slots,
            count, per_row, block_tables.shape[1],
            PAGE_SIZE=page_size, ROWS=rows, COLUMNS=columns, num_warps=_WARPS,
        )  # fmt: skip
    return slots
