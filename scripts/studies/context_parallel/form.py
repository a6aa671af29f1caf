"""What every form of context parallelism does and has to tell."""

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
    """Pairs of a query and a key: what the indexer scores (all its heads), and what attention computes, once for each
    head."""

    scored: int = 0
    attended: int = 0

    def index_flops(self, size: DSASize) -> float:
        """Of scoring: two for a multiply-add, in every index head."""
        return 2.0 * self.scored * size.index_heads * size.index_dim

    def attention_flops(self, size: DSASize) -> float:
        """A latent row is multiplied as key and as value."""
        return 2.0 * self.attended * (size.latent + size.mla.kv_rank)

    def flops(self, size: DSASize) -> float:
        """Both. Softmax, selection, W_UK and W_UV, which are the same in every form, are left out."""
        return self.index_flops(size) + self.attention_flops(size)


class CPForm(ABC):
    """One way to compute a layer's attention on several ranks.

    Args:
        layer: the same on every rank.
        group: the ranks.

    Raises:
        ValueError: so many ranks cannot run it.

    Attributes:
        name: as the options and tables call it.
        layout: how tokens are divided.
        work: pairs that this rank has computed, added up in :meth:`run` while it is not None: to count them makes the
            host wait.
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
        """:meth:`.Layer.attend`, counted."""
        self.count_attended(slots, q.shape[1])
        return self.layer.attend(q, pool, slots)

    def count_scored(self, seen: torch.Tensor) -> None:
        """``seen``: for every pair whether it counts, or how many do."""
        if self.work is not None:
            self.work.scored += int(seen.sum())

    def count_attended(self, slots: torch.Tensor, heads: int) -> None:
        if self.work is not None:
            self.work.attended += int((slots >= 0).sum()) * heads

    @classmethod
    @abstractmethod
    def collectives(cls, size: DSASize, division: Division, itemsize: int) -> list[Collective]:
        """What one run makes rank 0 send and receive, by formula, in order; all ranks send as much."""

    @classmethod
    def work_of(cls, size: DSASize, division: Division, rank: int) -> PairCounts:
        """What :meth:`run` computes on a rank, by formula: the heads of its own tokens."""
        return PairCounts(division.scored(rank), division.attended(rank, size.topk) * size.mla.heads)

    @classmethod
    @abstractmethod
    def held_bytes(cls, size: DSASize, division: Division, itemsize: int) -> int:
        """What a rank has to keep of other ranks' tokens, or for them, while it attends, by formula."""

    @classmethod
    def exposed(cls, communication: list[float], index: float, attention: float, before: float) -> float:
        """Time in which a rank only waits, where communication runs beside all work that does not need it.

        Args:
            communication: times of :meth:`collectives`.
            index, attention: times of the rank's work.
            before: of its work on local tokens between having its cache rows and needing those of others.
        """
        return max(0.0, communication[0] - before) + sum(communication[1:])

    @classmethod
    def refusal(cls, size: DSASize, ranks: int) -> str | None:
        """Why this form cannot run on so many ranks; None where it can."""
        return None


def to_all(kind: Kind, ranks: int, part: int) -> Collective:
    """A collective in which rank 0 sends ``part`` bytes to every other rank and gets as much from each."""
    each = (0, *(part for _ in range(ranks - 1)))
    return Collective(kind, tuple(range(ranks)), 0, each, each)


def to_next(ranks: int, nbytes: int, rank: int = 0) -> Collective:
    """A rank sends so many bytes to its neighbour; what comes from the other neighbour is not in it."""
    sent = [0] * ranks
    sent[(rank + 1) % ranks] = nbytes
    return Collective("send", tuple(range(ranks)), rank, tuple(sent), (0,) * ranks)


def padded(rows: torch.Tensor, count: int, value: float = 0) -> torch.Tensor:
    """``rows [T, ...]`` with more behind them: ``[count, ...]``."""
    if len(rows) == count:
        return rows
    return torch.cat((rows, rows.new_full((count - len(rows), *rows.shape[1:]), value)))
