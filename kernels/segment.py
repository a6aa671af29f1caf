"""Segments: how a flat batch of tokens is cut into runs of one sequence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch


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


def check_segments(segments: Sequence[Segment], rows: int, block_tables: torch.Tensor, page_size: int) -> None:
    """Raises ``ValueError`` for a segment outside of the batch or of its block table."""
    for segment in segments:
        if segment.length < 1 or segment.row < 0 or segment.row + segment.length > rows:
            raise ValueError(f"{segment} does not lie within the {rows} rows of the batch")
        if not 0 <= segment.sequence < block_tables.shape[0]:
            raise ValueError(f"{segment} names a sequence outside of the block table with {block_tables.shape[0]} rows")
        if segment.end > block_tables.shape[1] * page_size:
            raise ValueError(
                f"{segment} ends at token {segment.end}, its block table holds {block_tables.shape[1]} pages of "
                f"{page_size} tokens"
            )
