"""The front of the experts, the same for every weight format: pairs of tokens and experts are sorted by expert, the
format's products run over the rows of each expert, and the weighted results of a token are summed.

    out[t] = Σ_j weight[t, j] · mlp[expert[t, j]](x[t])        −1: another rank serves the choice
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from dsa_engine.kernels.moe.combine import combine
from dsa_engine.kernels.moe.expert_order import Order, expert_order

# Largest number of bytes of rows between the products for which every pair gets a row, served or not: the host need not
# know how many are served. That is 14,500 pairs of DeepSeek-V3.2: any decode. More pairs are counted, which waits for
# the device unless the dispatch has counted them.
UNCOUNTED_BYTES = 1 << 29


def check_experts(
    x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor,
    intermediate: int, packed: int = 1,
) -> None:  # fmt: skip
    """Checks tokens, choices and stored matrices.

    Args:
        gate_up: ``[experts, 2 · intermediate, hidden / packed]`` or ``[experts, 2, intermediate, hidden / packed]``.
        down: ``[experts, hidden, intermediate / packed]``.
        packed: numbers in an element of the matrices.

    Raises:
        ValueError: shapes that do not fit together.
    """
    if experts.shape != weights.shape or experts.shape[0] != x.shape[0]:
        raise ValueError(
            f"x {tuple(x.shape)}, experts {tuple(experts.shape)}, weights {tuple(weights.shape)} do not fit"
        )
    count, hidden, _ = down.shape
    halves = (2, intermediate) if gate_up.dim() == 4 else (2 * intermediate,)
    if gate_up.shape != (count, *halves, hidden // packed) or x.shape[1] != hidden:
        raise ValueError(f"x {tuple(x.shape)}, gate_up {tuple(gate_up.shape)}, down {tuple(down.shape)} do not fit")


def sum_experts_reference(
    x: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    count: int,
    mlp: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """The weighted sums by the reference of any weight format.

    Args:
        x: ``[T, …]``, what ``mlp`` takes of each token.
        experts, weights: as in :func:`sum_experts`.
        count: number of experts of this rank.
        mlp: ``(rows [R, …], counts [count]) -> [R, hidden]``, the experts' results for rows sorted by expert.
    """
    chosen = experts.flatten()
    local = chosen.shape[0] if chosen.numel() == 0 else int((chosen >= 0).sum())
    # A stable sort, with the choices that other ranks serve first: the tail is sorted by expert and then by token.
    order = chosen.argsort(stable=True)[chosen.shape[0] - local :]
    tokens = order // experts.shape[1]
    y = mlp(x.index_select(0, tokens), torch.bincount(chosen[order], minlength=count))
    out = torch.zeros(len(x), y.shape[1], dtype=torch.float32, device=x.device)
    out.index_add_(0, tokens, y.float().mul_(weights.flatten()[order, None]))
    return out.to(y.dtype)


def served_order(
    experts: torch.Tensor,
    count: int,
    first: int | None,
    row_bytes: int,
    served_fraction: float,
    uncounted_bytes: int,
    served: int | None = None,
) -> tuple[Order, float]:
    """Sorts pairs by expert, and estimates how many of them this rank serves.

    Args:
        experts, count, first, row_bytes, served_fraction, uncounted_bytes, served: as in :func:`sum_experts`.

    Returns:
        the order, with a row for each served pair where their number is known and else for every pair; and the number
        of served pairs, exact or expected.
    """
    order = expert_order(experts, count, first)
    # Nothing is gained by counting where all are served.
    if served is None and served_fraction < 1 and experts.numel() * row_bytes > uncounted_bytes:
        served = int(order.row_ends[-1])
    if served is None:
        return order, served_fraction * experts.numel()
    return order._replace(tokens=order.tokens[:served]), served


def sum_experts(
    experts: torch.Tensor,
    weights: torch.Tensor,
    mlp: Callable[[Order, float], torch.Tensor],
    *,
    count: int,
    first: int | None,
    row_bytes: int,
    served_fraction: float,
    served: int | None,
    uncounted_bytes: int,
) -> torch.Tensor:
    """The weighted sums by kernels.

    Args:
        experts, first: as in :func:`.expert_order.expert_order`.
        weights: ``[T, k]`` float32.
        mlp: ``(order, expected rows) -> [R, hidden]``, the experts' results for the rows of the order.
        count: number of experts of this rank.
        row_bytes: bytes of a row between the products.
        served_fraction: expected fraction of the choices that this rank serves: chooses kernels, never the result.
        served: number of the choices that this rank serves, where the host knows it.
        uncounted_bytes: see ``UNCOUNTED_BYTES``.
    """
    order, expected = served_order(experts, count, first, row_bytes, served_fraction, uncounted_bytes, served)
    return combine(mlp(order, expected), order.pair_rows, weights)
