"""Planned expert choices, for runs whose router has nothing sensible to choose from.

An emulated rank knows only its own tokens, and random weights route them anyhow: what its experts would get is
arbitrary. So the choices of all ranks' tokens are planned, from the number of tokens of each rank and nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
import torch.nn.functional as F

# Plans of this many tokens or fewer are kept for good (decode steps come again, and a CUDA graph may hold them).
_SMALL_STEP = 4096


@dataclass
class Planned:
    """Expert choices of all tokens of a step, those of rank 0 first.

    What is asked for is worked out once: every layer of a step asks for the same.
    """

    experts: torch.Tensor  # [tokens of all ranks, k] int32, global expert numbers
    rows: tuple[int, ...]  # tokens of every rank
    rank: int
    per_rank: int  # experts of a rank
    _own: dict[int, torch.Tensor] = field(default_factory=dict)
    _padded: dict[int, torch.Tensor] = field(default_factory=dict)

    def own(self, tokens: int) -> torch.Tensor:
        """``[tokens, k]``: of this rank's tokens, then −1 where a step is padded to ``tokens``."""
        if tokens not in self._own:
            mine = self.experts.split(self.rows)[self.rank]
            self._own[tokens] = F.pad(mine, (0, 0, 0, tokens - len(mine)), value=-1)
        return self._own[tokens]

    @cached_property
    def arriving(self) -> tuple[torch.Tensor, list[int]]:
        """The choices ``[R, k]`` of the tokens that come to this rank's experts, and how many come from each rank."""
        mine = (self.experts // self.per_rank == self.rank).any(dim=1)
        return self.experts[mine], [int(part.sum()) for part in mine.split(self.rows)]

    def padded(self, rows: int) -> torch.Tensor:
        """``[ranks · rows, k]``: every rank's choices, then −1 up to ``rows`` of them."""
        if rows not in self._padded:
            parts = [F.pad(part, (0, 0, 0, rows - len(part)), value=-1) for part in self.experts.split(self.rows)]
            self._padded[rows] = torch.cat(parts)
        return self._padded[rows]


@dataclass
class Routing:
    """Plans the choices of the tokens of ``world_size`` ranks, for rank ``rank``.

    Attributes:
        loads: relative load of every expert; None: all alike.
        rows: tokens of every rank in the step that runs. Where nobody has said, or this rank has fewer than that, all
            ranks are taken to have as many tokens as this one; where it has more, the rest is padding without experts.
        groups, top_groups: experts form ``groups`` consecutive groups, and a token chooses from ``top_groups`` of
            them, as in DeepSeek-V3's routing. Without ``loads`` the plan keeps to that where it divides evenly.
    """

    world_size: int
    rank: int
    loads: tuple[float, ...] | None = None
    rows: Sequence[int] | None = None
    groups: int = 1
    top_groups: int = 1
    _kept: dict[tuple[object, ...], Planned] = field(default_factory=dict)

    @property
    def plans(self) -> list[Planned]:
        """Those that are kept at present."""
        return list(self._kept.values())

    def plan(self, tokens: int, top_k: int, experts: int, device: torch.device) -> Planned:
        """Choices for a step in which this rank has ``tokens`` tokens; every layer of a step gets the same ones.

        Raises:
            ValueError: the loads are not one for each of the ``experts``, or give one of them more than all tokens.
        """
        rows = tuple(self.rows or ())
        if len(rows) != self.world_size or rows[self.rank] > tokens:
            rows = (tokens,) * self.world_size
        key = (rows, top_k, experts, device, self.loads, self.groups, self.top_groups)
        if key not in self._kept:
            if self.loads is None:
                chosen = balanced_choices(sum(rows), top_k, experts, self.groups, self.top_groups, device)
            else:
                chosen = weighted_choices(sum(rows), top_k, experts, self.loads, device)
            # Of the large ones only the last: memory stays flat.
            self._kept = {k: p for k, p in self._kept.items() if len(p.experts) <= _SMALL_STEP}
            self._kept[key] = Planned(chosen, rows, self.rank, experts // self.world_size)
        return self._kept[key]


def balanced_choices(
    tokens: int, top_k: int, experts: int, groups: int, top_groups: int, device: torch.device
) -> torch.Tensor:
    """int32 ``[tokens, top_k]``: distinct experts, each chosen equally often over all tokens, up to once.

    A token takes ``top_k / top_groups`` experts from each of ``top_groups`` groups, and neighbouring tokens other ones.
    Where groups do not divide so, a token takes its experts from all of them, which sends it to more ranks.
    """
    size, each = experts // groups, top_k // top_groups
    if groups * size != experts or top_groups > groups or top_groups * each != top_k or size % each:
        groups, top_groups, size, each = 1, 1, experts, top_k
    token = torch.arange(tokens, device=device)[:, None]
    choice = torch.arange(top_k, device=device)
    visit = token * top_groups + choice // each  # tokens visit the groups in turn
    place = visit // groups * each + choice % each
    # Experts of a group are taken far apart, so that a token's lie on different ranks.
    return (visit % groups * size + place * _stride(size) % size).to(torch.int32)


def weighted_choices(
    tokens: int, top_k: int, experts: int, loads: Sequence[float], device: torch.device
) -> torch.Tensor:
    """int32 ``[tokens, top_k]``: distinct experts, each chosen as often as its share of ``loads`` says, up to once.

    A token's experts lie far apart, whatever groups a router would have kept to.

    Raises:
        ValueError: not one load for each expert, or a share above ``1 / top_k``.
    """
    check_loads(loads, experts, top_k)
    pairs, total = tokens * top_k, math.fsum(loads)
    exact = [load / total * pairs for load in loads]
    counts = [min(tokens, int(share)) for share in exact]
    # What rounding down has left over goes to those that lost most by it.
    order = sorted(range(experts), key=lambda e: counts[e] - exact[e])
    for e in order[: pairs - sum(counts)]:
        counts[e] += 1
    by_expert = torch.arange(experts).repeat_interleave(torch.tensor(counts)).to(device=device, dtype=torch.int32)
    # Column after column: an expert's run is no longer than a column, so no token meets it twice.
    columns = by_expert.view(top_k, tokens).t()
    # Neighbours would choose alike, and neighbours share a rank: spread them.
    return columns[torch.arange(tokens, device=device) * _stride(tokens) % max(1, tokens)].contiguous()


def check_loads(loads: Sequence[float], experts: int, top_k: int) -> None:
    """``ValueError`` where ``loads`` cannot be those of a model with ``experts`` experts, ``top_k`` for each token."""
    if len(loads) != experts:
        raise ValueError(
            f"there are {len(loads)} expert loads, the model has {experts} routed experts; give one for each"
        )
    most = max(range(experts), key=lambda e: loads[e])
    share = loads[most] / math.fsum(loads)
    if share * top_k > 1 + 1e-9:
        raise ValueError(
            f"expert {most} has {share:.1%} of the load; a token chooses {top_k} different experts, so that one gets "
            f"at most {1 / top_k:.1%}"
        )


def _stride(size: int) -> int:
    """A step that visits each of ``size`` places once, and neighbours in time far apart: near the golden section."""
    step = max(1, round(size * 0.618))
    while math.gcd(step, size) != 1:
        step += 1
    return step
