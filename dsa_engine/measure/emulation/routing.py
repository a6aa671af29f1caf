"""Expert choices without a router: even, or by given loads."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch


def balanced_choices(
    tokens: int, top_k: int, experts: int, groups: int, top_groups: int, device: torch.device
) -> torch.Tensor:
    """int32 ``[tokens, top_k]``: distinct experts, each chosen equally often over all tokens, ±1.

    A token takes ``top_k / top_groups`` experts from each of ``top_groups`` groups, and its neighbours other ones.
    If the sizes do not divide, a token takes its experts from all groups, which sends it to more ranks.
    """
    size, each = experts // groups, top_k // top_groups
    if groups * size != experts or top_groups > groups or top_groups * each != top_k or size % each:
        groups, top_groups, size, each = 1, 1, experts, top_k
    token = torch.arange(tokens, device=device)[:, None]
    choice = torch.arange(top_k, device=device)
    visit = token * top_groups + choice // each  # tokens visit the groups in turn
    member = visit // groups * each + choice % each  # number within the group
    # Experts of a group are taken far apart, so that those of a token are on different ranks.
    return (visit % groups * size + member * _stride(size) % size).to(torch.int32)


def weighted_choices(
    tokens: int, top_k: int, experts: int, loads: Sequence[float], device: torch.device
) -> torch.Tensor:
    """int32 ``[tokens, top_k]``: distinct experts, each chosen in proportion to ``loads``, ±1.

    A token's experts are far apart and ignore the groups of a router.

    Raises:
        ValueError: not one load per expert, or a fraction above ``1 / top_k``.
    """
    check_loads(loads, experts, top_k)
    pairs, total = tokens * top_k, math.fsum(loads)
    exact = [load / total * pairs for load in loads]
    counts = [min(tokens, int(fraction)) for fraction in exact]
    # The rest of rounding down goes to the experts with the largest remainders.
    order = sorted(range(experts), key=lambda e: counts[e] - exact[e])
    for e in order[: pairs - sum(counts)]:
        counts[e] += 1
    by_expert = torch.arange(experts).repeat_interleave(torch.tensor(counts)).to(device=device, dtype=torch.int32)
    # Column after column: an expert fills at most a column's length of consecutive rows, so no token gets it twice.
    columns = by_expert.view(top_k, tokens).t()
    # Neighbouring tokens are on the same rank and would choose alike: spread them.
    return columns[torch.arange(tokens, device=device) * _stride(tokens) % max(1, tokens)].contiguous()


def check_loads(loads: Sequence[float], experts: int, top_k: int) -> None:
    """Raises ``ValueError`` if ``loads`` cannot be those of a model with ``experts`` experts, ``top_k`` for each
    token."""
    if len(loads) != experts:
        raise ValueError(
            f"there are {len(loads)} expert loads, the model has {experts} routed experts; give one for each"
        )
    busiest = max(range(experts), key=lambda e: loads[e])
    fraction = loads[busiest] / math.fsum(loads)
    if fraction * top_k > 1 + 1e-9:
        raise ValueError(
            f"expert {busiest} has {fraction:.1%} of the load; a token chooses {top_k} different experts, so one gets "
            f"at most {1 / top_k:.1%}"
        )


def _stride(size: int) -> int:
    """A stride that visits each of ``size`` members once, with successive members far apart: near the golden
    section."""
    step = max(1, round(size * 0.618))
    while math.gcd(step, size) != 1:
        step += 1
    return step
