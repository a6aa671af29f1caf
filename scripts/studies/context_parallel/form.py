"""Interface of the forms of context parallelism."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from context_parallel.division import Division
from context_parallel.layer import DSASize, Layer, Tokens
from dsa_engine.parallel.collective_log import Collective, Kind
from dsa_engine.parallel.group import Group


@dataclass
class PairCounts:
    """Numbers of query-key pairs: those that the indexer scores (in all heads at once), and those of attention, counted
    once per head."""

    scored: int = 0
    attended: int = 0

    def index_flops(self, size: DSASize) -> float:
        """Operations of scoring: two for a multiply-add, in every index head."""
        return 2.0 * self.scored * size.index_heads * size.index_dim

    def attention_flops(self, size: DSASize) -> float:
        """Operations of attention: a latent row is multiplied as key and as value."""
        return 2.0 * self.attended * (size.latent + size.mla.kv_rank)

    def flops(self, size: DSASize) -> float:
        """Operations of both. Softmax, selection, W_UK and W_UV are the same in every form and not counted."""
        return self.index_flops(size) + self.attention_flops(size)


class CPForm(ABC):
    """One way to compute a layer's attention on several ranks.

    Args:
        layer: the layer, equal on every rank.
        group: the ranks.

    Raises:
        ValueError: the form cannot run on so many ranks.

    Attributes:
        name: its name in options and tables.
        layout: layout of the tokens.
        work: pairs that this rank computes in :meth:`run`; None: not counted, as counting makes the host wait.
    """

    name: str
    layout = "head_tail"

    def __init__(self, layer: Layer, group: Group):
        refusal = self.refusal(layer.size, group.size)
        if refusal:
            raise ValueError(refusal)
        self.layer, self.group = layer, group
        self.work: PairCounts | None = None

    @abstractmethod
    def run(self, division: Division, tokens: Tokens) -> torch.Tensor:
        """``[T, heads, value]`` of this rank's tokens; every rank calls it."""

    def attend(self, q: torch.Tensor, pool: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """:meth:`.Layer.attend` with its pairs counted."""
        self.count_attended(slots, q.shape[1])
        return self.layer.attend(q, pool, slots)

    def count_scored(self, seen: torch.Tensor) -> None:
        """Adds scored pairs. ``seen``: a mask of pairs, or numbers of pairs."""
        if self.work is not None:
            self.work.scored += int(seen.sum())

    def count_attended(self, slots: torch.Tensor, heads: int) -> None:
        if self.work is not None:
            self.work.attended += int((slots >= 0).sum()) * heads

    @classmethod
    @abstractmethod
    def collectives(cls, size: DSASize, division: Division, itemsize: int) -> list[Collective]:
        """Collectives of one run on rank 0, by formula, in order; all ranks send equally many bytes."""

    @classmethod
    def work_of(cls, size: DSASize, division: Division, rank: int) -> PairCounts:
        """Pairs that :meth:`run` computes on a rank, by formula: all heads of its own tokens."""
        return PairCounts(division.scored(rank), division.attended(rank, size.topk) * size.mla.heads)

    @classmethod
    @abstractmethod
    def held_bytes(cls, size: DSASize, division: Division, itemsize: int) -> int:
        """Bytes that a rank holds for other ranks' tokens during attention, by formula."""

    @classmethod
    def exposed(cls, communication: list[float], index: float, attention: float, before: float) -> float:
        """Time in which a rank only waits, if communication overlaps with all work that does not need it.

        Args:
            communication: times of :meth:`collectives`.
            index, attention: times of the rank's work.
            before: time of the work on local tokens between computing its cache rows and needing those of others.
        """
        return max(0.0, communication[0] - before) + sum(communication[1:])

    @classmethod
    def refusal(cls, size: DSASize, ranks: int) -> str | None:
        """The reason why this form cannot run on so many ranks; None if it can."""
        return None


def to_all(kind: Kind, ranks: int, part: int) -> Collective:
    """A collective in which rank 0 sends ``part`` bytes to every other rank and receives as many from each."""
    each = (0, *(part for _ in range(ranks - 1)))
    return Collective(kind, tuple(range(ranks)), 0, each, each)


def to_next(ranks: int, nbytes: int, rank: int = 0) -> Collective:
    """A message of ``nbytes`` from a rank to its neighbour; that from the other neighbour is not included."""
    sent = [0] * ranks
    sent[(rank + 1) % ranks] = nbytes
    return Collective("send", tuple(range(ranks)), rank, tuple(sent), (0,) * ranks)


def padded(rows: torch.Tensor, count: int, value: float = 0) -> torch.Tensor:
    """``rows [T, ...]`` with padding after them: ``[count, ...]``."""
    if len(rows) == count:
        return rows
    return torch.cat((rows, rows.new_full((count - len(rows), *rows.shape[1:]), value)))
