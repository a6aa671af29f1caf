"""The placement of experts on ranks.

The model's router chooses *logical* experts. Ranks hold *physical* experts, numbered rank after rank. A logical expert
has one physical expert or several, its replicas, which have the same weights. A dispatch sees only physical experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain

import torch

from dsa_engine.kernels.moe.choose_replicas import Replicas, choose_replicas
from dsa_engine.kernels.runtime.transfer import upload

Held = tuple[tuple[int, ...], ...]  # for every rank, its logical experts in the order of its weights


class ExpertPlacement:
    """The ranks of each expert of a layer; the same on every rank.

    Args:
        held: for every rank, its logical experts in the order of its weights. Ranks may hold different numbers of them.
        device: device of the tensors that map experts.
        changes: whether :meth:`change` may be called, so that CUDA graphs must look every expert up.

    Attributes:
        held: as given.
        experts: number of logical experts.
        physical: number of physical experts.
        rank_of: int32 ``[physical]``, the rank of each physical expert.

    Raises:
        ValueError: an expert is missing, or a rank has none.
    """

    def __init__(self, held: Sequence[Sequence[int]], device: torch.device, changes: bool = False):
        self.held = _checked(held)
        self.experts = 1 + max(max(experts) for experts in self.held)
        self._first = [0, *accumulate(len(experts) for experts in self.held)]  # physical experts before each rank's
        self.physical = self._first[-1]
        ranks = [rank for rank, experts in enumerate(self.held) for _ in experts]
        self.rank_of = torch.tensor(ranks, dtype=torch.int32, device=device)
        # Each rank's first physical expert and their number; made here, as a CUDA graph may read them.
        self._spans = torch.tensor([*zip(self._first, map(len, self.held))], device=device)
        self._replicas: torch.Tensor | None = None  # [experts, 1 + n]: see choose_replicas
        if changes or [*chain(*self.held)] != list(range(self.physical)):
            self._replicas = self._table().to(device)

    @classmethod
    def contiguous(cls, experts: int, ranks: int, device: torch.device) -> ExpertPlacement:
        """See :func:`contiguous`."""
        return cls(contiguous(experts, ranks), device)

    def change(self, held: Sequence[Sequence[int]]) -> None:
        """Replaces ``held``, for the work that is given to the device from now on; CUDA graphs stay valid. The host
        does not wait.

        Raises:
            ValueError: a rank would hold another number of experts, or see the class.
        """
        assert self._replicas is not None, "made with changes=True"
        changed = _checked(held)
        if [*map(len, changed)] != [*map(len, self.held)] or {*chain(*changed)} != set(range(self.experts)):
            raise ValueError(
                f"a placement keeps its {self.experts} logical experts and the number on each rank, "
                f"{[*map(len, self.held)]!r:.200}; not {held!r:.200}"
            )
        self.held = changed
        upload(self._table(), self._replicas.device, out=self._replicas)

    @property
    def ranks(self) -> int:
        return len(self.held)

    def count(self, rank: int) -> int:
        """Number of physical experts of a rank."""
        return len(self.held[rank])

    def fraction(self, rank: int) -> float:
        """The fraction of all physical experts that a rank holds."""
        return self.count(rank) / self.physical

    def first(self, rank: int) -> int:
        """The first physical expert of a rank."""
        return self._first[rank]

    def replicas(self) -> list[list[int]]:
        """The physical experts of each logical one, ascending."""
        of_logical: list[list[int]] = [[] for _ in range(self.experts)]
        for number, expert in enumerate(chain(*self.held)):
            of_logical[expert].append(number)
        return of_logical

    def to_physical(self, topk_ids: torch.Tensor, first: int = 0) -> torch.Tensor:
        """The physical experts of logical ones ``topk_ids [T, k]``, int32; −1 stays −1.

        Rows are numbered from ``first``; the number decides which replica computes a row, so that each computes
        equally many.
        """
        replicas = self.choosing(first)
        return topk_ids if replicas is None else choose_replicas(topk_ids, *replicas)

    def choosing(self, first: int) -> Replicas | None:
        """What :meth:`to_physical` chooses with; None: physical experts are numbered as logical ones."""
        return None if self._replicas is None else Replicas(self._replicas, first)

    def spread(self, topk_ids: torch.Tensor, first: int = 0) -> torch.Tensor:
        """Physical experts instead of ``topk_ids [T, k]``, each on the rank after that of the one before; −1 stays.

        The pairs of all ranks are numbered, and this rank's begin with number ``first``: so every rank is chosen
        equally often.
        """
        numbers = torch.arange(first, first + topk_ids.numel(), device=topk_ids.device).view(topk_ids.shape)
        rank, turn = numbers % self.ranks, numbers // self.ranks
        spans = self._spans[rank]
        return (spans[..., 0] + turn % spans[..., 1]).to(topk_ids.dtype).where(topk_ids >= 0, topk_ids)

    def local(self, physical: torch.Tensor, rank: int) -> torch.Tensor:
        """The same experts counted within those of ``rank``, −1 for experts of other ranks."""
        local = physical - self._first[rank]
        return local.masked_fill((local < 0) | (local >= self.count(rank)), -1)

    def _table(self) -> torch.Tensor:
        """It is as wide as for the placement with the most replicas of one expert."""
        table = torch.full((self.experts, 2 + self.physical - self.experts), -1, dtype=torch.int32)
        for expert, physical in enumerate(self.replicas()):
            table[expert, : 1 + len(physical)] = torch.tensor([len(physical), *physical], dtype=torch.int32)
        return table


def contiguous(experts: int, ranks: int) -> Held:
    """Consecutive experts on each rank, divided evenly; the first ranks hold one more if there is a remainder.

    Raises:
        ValueError: there are more ranks than experts.
    """
    if ranks > experts:
        raise ValueError(
            f"n_routed_experts {experts} cannot be divided over {ranks} ranks: each holds at least one; "
            f"start at most {experts}"
        )
    counts = [experts // ranks + (rank < experts % ranks) for rank in range(ranks)]
    firsts = [0, *accumulate(counts)]
    return tuple(tuple(range(first, last)) for first, last in zip(firsts, firsts[1:], strict=False))


def _checked(held: Sequence[Sequence[int]]) -> Held:
    experts = {expert for of_rank in held for expert in of_rank}
    if experts != set(range(len(experts))) or not all(held) or not held:
        raise ValueError(f"every expert lies on a rank, and every rank holds one; not {held!r:.200}")
    return tuple(tuple(of_rank) for of_rank in held)
