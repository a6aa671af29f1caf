"""Segments: how a flat batch of tokens is cut into runs of one sequence."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from dsa_engine.kernels.transfer import upload


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
    """The segments of a batch, one after the other from row 0: runs on the host, for loops and launch sizes, and the
    same per row on the device, for kernels."""

    runs: tuple[Segment, ...]
    sequences: torch.Tensor  # [rows] int32, each row's row of the block table
    visible: torch.Tensor  # [rows] int32, how many tokens each row sees: its position + 1
    _tiles: dict[int, torch.Tensor] = field(default_factory=dict, compare=False, repr=False)
    _parts: dict[tuple[int, int], Segments] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def of(cls, runs: Iterable[Segment], device: torch.device | str = "cpu") -> Segments:
        """Raises ``ValueError`` where a segment is empty or does not begin where the one before ends."""
        runs = tuple(runs)
        rows = 0
        for run in runs:
            if run.row != rows or run.length < 1:
                raise ValueError(f"{run} must have a length and begin at row {rows}, where the segment before it ends")
            rows += run.length
        lengths = torch.tensor([run.length for run in runs], dtype=torch.int64)
        sequences = torch.tensor([run.sequence for run in runs], dtype=torch.int32).repeat_interleave(lengths)
        # Position less row, of each segment: added to the rows' numbers it gives their positions.
        offsets = torch.tensor([run.start - run.row for run in runs], dtype=torch.int32).repeat_interleave(lengths)
        visible = torch.arange(1, rows + 1, dtype=torch.int32) + offsets
        return cls(runs, upload(sequences, device), upload(visible, device))

    def __iter__(self) -> Iterator[Segment]:
        return iter(self.runs)

    def __len__(self) -> int:
        return len(self.runs)

    @property
    def rows(self) -> int:
        return self.visible.shape[0]

    @property
    def longest(self) -> int:
        """Most tokens that any row sees; 0 without rows."""
        return max((run.end for run in self.runs), default=0)

    def part(self, first: int, last: int) -> Segments:
        """The rows ``first … last-1``, numbered from 0; on the device these are views. The same object each time, with
        its tiles, so that layers after the first copy nothing to the device."""
        if (first, last) == (0, self.rows):
            return self
        if (first, last) not in self._parts:
            self._parts[first, last] = self._part(first, last)
        return self._parts[first, last]

    def _part(self, first: int, last: int) -> Segments:
        runs = []
        for run in self.runs:
            begin, end = max(run.row, first), min(run.row + run.length, last)
            if begin < end:
                runs.append(Segment(begin - first, end - begin, run.sequence, run.start + begin - run.row))
        return Segments(tuple(runs), self.sequences[first:last], self.visible[first:last])

    def tiles(self, size: int) -> torch.Tensor:
        """int32 ``[tiles, 2]`` on the device: first row and row count of tiles of at most ``size`` rows, none of which
        crosses a segment. Made once."""
        if size not in self._tiles:
            tiles = [
                (run.row + done, min(size, run.length - done))
                for run in self.runs
                for done in range(0, run.length, size)
            ]
            self._tiles[size] = upload(torch.tensor(tiles, dtype=torch.int32).view(-1, 2), self.visible.device)
        return self._tiles[size]

    def check(self, rows: int, block_tables: torch.Tensor, page_size: int) -> None:
        """Raises ``ValueError`` unless these are ``rows`` rows, each within its block table."""
        if self.rows != rows:
            raise ValueError(f"the segments have {self.rows} rows, the batch has {rows}")
        for run in self.runs:
            if not 0 <= run.sequence < block_tables.shape[0]:
                raise ValueError(f"{run} names a sequence outside of the block table with {block_tables.shape[0]} rows")
            if run.start < 0 or run.end > block_tables.shape[1] * page_size:
                raise ValueError(
                    f"{run} ends at token {run.end}, its block table holds {block_tables.shape[1]} pages of "
                    f"{page_size} tokens"
                )
