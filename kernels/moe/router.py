"""Router of the mixture of experts: sigmoid scores, choice limited to the best groups (DeepSeek-V3, section 2.1.2).

    s = sigmoid(x · Wᵀ);  choice = s + bias;  a group's rank is the sum of its 2 best choices;
    the top experts are chosen within the top groups;  weights = s of the chosen, normalised, times a factor

The bias only chooses, it never weighs. Everything is float32. Among equals the lower number is chosen, of groups and of
experts.

Bits of a token: they depend on its logits alone, and ties go to the lowest number.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from dsa_engine.kernels.runtime import cpu
from dsa_engine.kernels.runtime.integers import next_power_of_2
from dsa_engine.kernels.runtime.kernel import kernel
from dsa_engine.kernels.runtime.launch import runs_triton
from dsa_engine.kernels.runtime.operation import operation


def _top(values: torch.Tensor, count: int) -> torch.Tensor:
    """Indices of the ``count`` largest of ``values [T, n]`` in each row, best first, the lower of equals before."""
    if values.numel() <= 1024:  # a few tokens: one operation costs less than the five below
        return values.sort(dim=-1, descending=True, stable=True).indices[:, :count]
    # float32 in an order of integers, and below that the index: no two keys are equal, topk has nothing to decide.
    bits = values.contiguous().view(torch.int32)
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()
    reversed_index = torch.arange(values.shape[-1] - 1, -1, -1, device=values.device)
    return ((ordered << 32) | reversed_index).topk(count, dim=-1).indices


class Routing(NamedTuple):
    """How experts are chosen: ``top_k`` of them within the ``top_groups`` best of ``groups`` groups; their weights are
    normalised or not, and multiplied by ``factor``."""

    top_k: int
    groups: int
    top_groups: int
    normalise: bool
    factor: float


def route_reference(
    logits: torch.Tensor, bias: torch.Tensor, how: Routing, token_mask: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    scores = logits.sigmoid()
    choice = scores + bias
    if how.groups > 1:
        grouped = choice.unflatten(-1, (how.groups, -1))
        ranks = grouped.topk(2, dim=-1).values.sum(dim=-1)
        best = _top(ranks, how.top_groups)
        closed = torch.ones_like(ranks, dtype=torch.bool).scatter_(1, best, False)
        choice = grouped.masked_fill(closed.unsqueeze(-1), float("-inf")).flatten(-2)
    topk_ids = _top(choice, how.top_k)
    topk_weights = scores.gather(1, topk_ids)
    if how.normalise:
        topk_weights = topk_weights / (topk_weights.sum(dim=-1, keepdim=True) + 1e-20)
    topk_ids = topk_ids.int()
    return topk_ids if token_mask is None else topk_ids.masked_fill(~token_mask[:, None], -1), topk_weights * how.factor


_WORST = tl.constexpr(-(2**63))


@triton.jit
def _key(values, numbers):
    """int64 keys of which no two are equal: by value, then the lower number first. NaN is ordered among them too, so
    that every choice is a valid number."""
    bits = values.to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - numbers).to(tl.int64)


@triton.jit
def _value(key):
    ordered = (key >> 32).to(tl.int32)
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _number(key):
    return 0x7FFFFFFF - (key & 0x7FFFFFFF).to(tl.int32)


@kernel
def route_kernel(
    logits, bias, token_mask, topk_ids, topk_weights, factor,
    TOP_K: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr, TOP_GROUPS: tl.constexpr, NORMALISE: tl.constexpr,
    GROUPS_PAD: tl.constexpr, SIZE_PAD: tl.constexpr, TOP_K_PAD: tl.constexpr,
):  # fmt: skip
    """A token a program. Its row lies in the registers of one warp as [groups, experts of a group]. With two, Triton
    3.6 puts the number of the row between the lanes of a row, and its maxima over neighbouring lanes mix both rows."""
    row = tl.program_id(0).to(tl.int64)
    group, member = tl.arange(0, GROUPS_PAD), tl.arange(0, SIZE_PAD)
    number = group[:, None] * SIZE + member[None, :]
    inside = (group < GROUPS)[:, None] & (member < SIZE)[None, :]
    start = row * (GROUPS * SIZE)
    values = tl.load(logits + start + number, mask=inside, other=0.0)
    choice = tl.sigmoid(values) + tl.load(bias + number, mask=inside, other=0.0)
    keys = tl.where(inside, _key(choice, number), _WORST)
    if TOP_GROUPS < GROUPS:
        best = tl.max(keys, axis=1)
        second = tl.max(tl.where(keys == best[:, None], _WORST, keys), axis=1)
        ranks = tl.where(group < GROUPS, _key(_value(best) + _value(second), group), _WORST)
        unchosen = ranks
        for _ in tl.static_range(TOP_GROUPS):
            unchosen = tl.where(unchosen == tl.max(unchosen, axis=0), _WORST, unchosen)
        keys = tl.where((ranks != unchosen)[:, None], keys, _WORST)
    keys = tl.reshape(keys, (GROUPS_PAD * SIZE_PAD,))
    column = tl.arange(0, TOP_K_PAD)
    chosen = tl.zeros((TOP_K_PAD,), tl.int32)
    for j in tl.static_range(TOP_K):
        best = tl.max(keys, axis=0)
        keys = tl.where(keys == best, _WORST, keys)
        chosen = tl.where(column == j, _number(best), chosen)
    wanted = column < TOP_K
    # The chosen logits are read again, from the cache, which is less work than carrying scores through the choice.
    score = tl.sigmoid(tl.load(logits + start + chosen, mask=wanted, other=0.0))
    if NORMALISE:
        score = score / (tl.sum(tl.where(wanted, score, 0.0), axis=0) + 1e-20)
    out = row * TOP_K + column
    if token_mask is not None:
        chosen = tl.where(tl.load(token_mask + row) != 0, chosen, -1)
    tl.store(topk_ids + out, chosen, mask=wanted)
    tl.store(topk_weights + out, score * factor, mask=wanted)


def _run(
    logits: torch.Tensor, bias: torch.Tensor, how: Routing, token_mask: torch.Tensor | None, *, native: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Runs ``cpu/router.cpp`` if ``native``, else the Triton kernel."""
    (rows, count), (top_k, groups, top_groups, normalise, factor) = logits.shape, how
    logits, bias = logits.contiguous(), bias.contiguous()
    token_mask = None if token_mask is None else token_mask.contiguous()
    topk_ids = torch.empty(rows, top_k, dtype=torch.int32, device=logits.device)
    topk_weights = torch.empty(rows, top_k, dtype=torch.float32, device=logits.device)
    if native:
        library, threads = cpu.kernels(), cpu.row_threads(4 * logits.numel())
        scratch = logits.new_empty(threads * library.dsa_route_scratch(count, groups))
        library.dsa_route(
            logits.data_ptr(), bias.data_ptr(), None if token_mask is None else token_mask.data_ptr(),
            topk_ids.data_ptr(), topk_weights.data_ptr(), scratch.data_ptr(), rows, count, groups, top_groups, top_k,
            normalise, factor, threads,
        )  # fmt: skip
    elif rows:
        size = count // groups
        # One warp a program: maxima need no shared memory.
        route_kernel[(rows,)](
            logits, bias, token_mask, topk_ids, topk_weights, factor,
            TOP_K=top_k, GROUPS=groups, SIZE=size, TOP_GROUPS=top_groups, NORMALISE=normalise,
            GROUPS_PAD=next_power_of_2(groups), SIZE_PAD=next_power_of_2(size),
            TOP_K_PAD=next_power_of_2(top_k), num_warps=1,
        )  # fmt: skip
    return topk_ids, topk_weights


def _by_expert(given: dict[str, Any], result: tuple[torch.Tensor, torch.Tensor]) -> list[torch.Tensor]:
    """The weights of all experts, float32 ``[T, experts + 2]``; the last two columns are of −1 and of what is no
    number of an expert."""
    topk_ids, topk_weights = result
    count = given["logits"].shape[1]
    column = torch.where((topk_ids >= 0) & (topk_ids < count), topk_ids, torch.where(topk_ids == -1, count, count + 1))
    return [topk_weights.new_zeros(len(topk_ids), count + 2).scatter_(1, column.long(), topk_weights)]


@operation(runs=cpu.runs_kernel, near_ties=_by_expert)
def route(
    logits: torch.Tensor,
    bias: torch.Tensor,
    *,
    top_k: int,
    groups: int,
    top_groups: int,
    normalise: bool,
    factor: float,
    token_mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Chooses experts for every token.

    Args:
        logits: float32 ``[T, experts]``, consecutive experts forming a group.
        bias: float32 ``[experts]``, the correction bias.
        token_mask: bool ``[T]``: rows that are tokens; the others choose no expert, −1. Default: all are.

    Returns:
        ``topk_ids [T, top_k]`` int32, best first, and their ``topk_weights [T, top_k]`` float32.
    """
    if logits.dtype != torch.float32 or bias.dtype != torch.float32:
        raise ValueError(f"the router works in float32; got logits {logits.dtype} and bias {bias.dtype}")
    if logits.shape[-1] != bias.shape[0] or logits.shape[-1] % groups:
        raise ValueError(f"logits {tuple(logits.shape)}, bias {tuple(bias.shape)} and {groups} groups do not fit")
    size = bias.shape[0] // groups
    if groups > 1 and size < 2:
        raise ValueError(f"{bias.shape[0]} experts in {groups} groups: a group is ranked by 2 experts")
    if not 1 <= top_groups <= groups or not 1 <= top_k <= top_groups * size:
        raise ValueError(f"top {top_k} experts within top {top_groups} of {groups} groups of {size} experts")
    if token_mask is not None and (token_mask.shape != logits.shape[:1] or token_mask.dtype != torch.bool):
        raise ValueError(
            f"token_mask must be bool [{logits.shape[0]}], not {token_mask.dtype} {list(token_mask.shape)}"
        )
    how = Routing(top_k, groups, top_groups, normalise, factor)
    native = cpu.serves(logits, bias)
    if not native and not runs_triton(logits):
        return route_reference(logits, bias, how, token_mask)
    return _run(logits, bias, how, token_mask, native=native)
