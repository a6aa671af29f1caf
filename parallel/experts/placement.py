"""The placement of experts on ranks.

The model's router chooses *logical* experts. Ranks hold *physical* experts, numbered rank after rank. A dispatch sees
only physical experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch


class ExpertPlacement:
    """The rank of each expert of a model; the same on every rank. Every logical expert has one physical expert.

    Args:
        held: for every rank, its logical experts in the order of its weights. Ranks may hold different numbers of them.
        device: device of the tensors that map choices.

    Attributes:
        rank_of: int32 ``[experts]``, the rank of each physical expert.

    Raises:
        ValueError: an expert is missing, or held twice, or a rank has none.
    """

    def __init__(self, held: Sequence[Sequence[int]], device: torch.device):
        self.held = tuple(tuple(experts) for experts in held)
        logical = [expert for experts in self.held for expert in experts]  # the logical expert of each physical one
        if sorted(logical) != list(range(len(logical))) or not all(self.held):
            raise ValueError(f"every expert lies on one rank, and every rank holds one; not {held!r:.200}")
        self.experts = len(logical)
        self._first = [0, *accumulate(len(experts) for experts in self.held)]  # physical experts before each rank's
        physical = [0] * self.experts
        for number, expert in enumerate(logical):
            physical[expert] = number
        self._physical: torch.Tensor | None = None
        if physical != list(range(self.experts)):
            # The last entry is for expert −1, which means no expert.
            self._physical = torch.tensor([*physical, -1], dtype=torch.int32, device=device)
        ranks = [rank for rank, experts in enumerate(self.held) for _ in experts]
        self.rank_of = torch.tensor(ranks, dtype=torch.int32, device=device)

    @classmethod
    def contiguous(cls, experts: int, ranks: int, device: torch.device) -> ExpertPlacement:
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
        return cls([range(first, last) for first, last in zip(firsts, firsts[1:], strict=False)], device)

    @property
    def ranks(self) -> int:
        return len(self.held)

    def count(self, rank: int) -> int:
        """Number of physical experts of a rank."""
        return len(self.held[rank])

    def fraction(self, rank: int) -> float:
        """The fraction of all physical experts that a rank holds."""
        return self.count(rank) / self.experts

    def first(self, rank: int) -> int:
        """The first physical expert of a rank."""
        return self._first[rank]

    def to_physical(self, experts: torch.Tensor) -> torch.Tensor:
        """The physical experts of logical ones: int32 of any shape, −1 stays −1."""
        return experts if self._physical is None else self._physical[experts.long()]

    def spread(self, experts: torch.Tensor, first: int = 0) -> torch.Tensor:
        """Physical experts instead of ``experts [T, k]``, each on the rank after that of the one before; −1 stays.

        The choices of all ranks are numbered, and this rank's begin with number ``first``: so every rank is chosen
        equally often.
        """
        numbers = torch.arange(first, first + experts.numel(), device=experts.device).view(experts.shape)
        rank, turn = numbers % self.ranks, numbers // self.ranks
        counts = torch.tensor([len(held) for held in self.held], device=experts.device)
        of_rank = torch.tensor(self._first[:-1], device=experts.device)
        return (of_rank[rank] + turn % counts[rank]).to(experts.dtype).where(experts >= 0, experts)

    def local(self, physical: torch.Tensor, rank: int) -> torch.Tensor:
        """The same experts counted within those of ``rank``, −1 for experts of other ranks."""
        local = physical - self._first[rank]
        return local.masked_fill((local < 0) | (local >= self.count(rank)), -1)
