"""Division of a sequence's tokens over ranks, and the work of each rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from dsa_engine.kernels.rows.segment import Segment
from dsa_engine.parallel.context_parallel import split_sequence


@dataclass(frozen=True)
class Division:
    """``length`` tokens over ``ranks``, in a layout of :func:`~dsa_engine.parallel.context_parallel.split_sequence`."""

    length: int
    ranks: int
    layout: str

    @cached_property
    def segments(self) -> list[list[tuple[int, int]]]:
        """Segments of every rank: pairs of first position and count."""
        return split_sequence(0, self.length, self.ranks, self.layout)

    @cached_property
    def rows(self) -> int:
        """Maximum number of tokens of a rank: the rows of each rank in a collective, padding included."""
        return max(self.count(rank) for rank in range(self.ranks))

    def count(self, rank: int) -> int:
        """Tokens of a rank."""
        return sum(count for _, count in self.segments[rank])

    def slots(self, device: torch.device) -> torch.Tensor:
        """``[ranks * rows]`` int32: the position of each gathered row, −1 for padding."""
        slots = torch.full((self.ranks, self.rows), -1, dtype=torch.int32)
        for row, segments in zip(slots, self.segments, strict=True):
            positions = [torch.arange(start, start + count) for start, count in segments]
            row[: sum(map(len, positions))] = torch.cat(positions) if positions else row[:0]
        return slots.flatten().to(device)

    def scored(self, rank: int) -> int:
        """Query-key pairs that the indexer scores for a rank's tokens."""
        return sum(Segment(0, count, 0, start).visible_pairs for start, count in self.segments[rank])

    def attended(self, rank: int, topk: int) -> int:
        """Query-key pairs of a rank's tokens after each has selected ``topk`` of the tokens that it sees."""
        return sum(
            selected_pairs(start + count, topk) - selected_pairs(start, topk) for start, count in self.segments[rank]
        )


def selected_pairs(length: int, topk: int) -> int:
    """Pairs of the first ``length`` tokens: Σ min(position + 1, topk)."""
    few = min(length, topk)
    return few * (few + 1) // 2 + (length - few) * topk


def imbalance(work: Sequence[float]) -> float:
    """The work of the most loaded rank over the mean: 1 if all ranks have equal work."""
    return max(work) / (sum(work) / len(work))
