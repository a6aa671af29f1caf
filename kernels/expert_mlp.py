"""The experts of one rank, over tokens that are sorted by expert.

out[t] = Σ_j weight[t, j] · down[e] · silu_mul(gate_up[e] · x[t]),   e = expert[t, j];  −1 stands for nobody here
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from dsa_engine.kernels.silu_mul import silu_mul


def grouped_matmul_reference(x: torch.Tensor, weight: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    out = torch.empty(x.shape[0], weight.shape[1], dtype=x.dtype, device=x.device)
    first = 0
    for expert, count in enumerate(counts.tolist()):
        if count:
            torch.mm(x[first : first + count], weight[expert].t(), out=out[first : first + count])
        first += count
    return out


def grouped_matmul(x: torch.Tensor, weight: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Multiplies each group of rows by its own matrix.

    Args:
        x: ``[R, in]``, rows sorted by group.
        weight: ``[groups, out, in]``.
        counts: ``[groups]`` integer, rows per group; their sum is R.

    Returns:
        ``[R, out]`` in x's dtype. PyTorch's ``grouped_mm`` on CUDA in bfloat16 where its 16-byte strides allow, else a
        loop over the groups (on a CPU the loop is also the faster of the two).
    """
    if x.shape[1] != weight.shape[2] or weight.shape[0] != counts.shape[0]:
        raise ValueError(f"x {tuple(x.shape)}, weight {tuple(weight.shape)}, counts {tuple(counts.shape)} do not fit")
    if x.shape[0] == 0:
        return x.new_empty(0, weight.shape[1])
    aligned = all(width * x.element_size() % 16 == 0 for width in weight.shape[1:])
    if x.is_cuda and x.dtype == torch.bfloat16 and aligned and hasattr(F, "grouped_mm"):
        ends = counts.cumsum(0, dtype=torch.int32)
        return F.grouped_mm(x, weight.transpose(1, 2), offs=ends)
    return grouped_matmul_reference(x, weight, counts)


def expert_mlp(
    x: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
) -> torch.Tensor:
    """Weighted sum of the chosen experts' outputs for every token.

    Args:
        x: ``[T, hidden]``.
        experts: ``[T, k]`` int32 numbers within this rank's experts, −1 for choices that other ranks serve.
        weights: ``[T, k]`` float32.
        gate_up: ``[experts, 2·intermediate, hidden]``.
        down: ``[experts, hidden, intermediate]``.

    Returns:
        ``[T, hidden]`` in x's dtype, summed in float32; zeros for a token that has nobody here.
    """
    if experts.shape != weights.shape or experts.shape[0] != x.shape[0]:
        raise ValueError(
            f"x {tuple(x.shape)}, experts {tuple(experts.shape)}, weights {tuple(weights.shape)} do not fit"
        )
    chosen = experts.flatten()
    local = chosen.shape[0] if chosen.numel() == 0 else int((chosen >= 0).sum())
    # A stable sort with nobody's choices first: the tail is sorted by expert and, within one, by token.
    order = chosen.argsort(stable=True)[chosen.shape[0] - local :]
    tokens = order // experts.shape[1]
    counts = torch.bincount(chosen[order], minlength=gate_up.shape[0])
    hidden = grouped_matmul(silu_mul(grouped_matmul(x[tokens], gate_up, counts)), down, counts)
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    out.index_add_(0, tokens, hidden.float().mul_(weights.flatten()[order, None]))
    return out.to(x.dtype)
