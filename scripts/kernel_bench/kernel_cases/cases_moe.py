"""Routing and experts: DeepSeek-V3.2 under expert parallelism, balanced."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from dsa_engine.kernels.grouped.grouped_matmul import (
    grouped_matmul_reference,
    grouped_matmul_torch,
    grouped_matmul_triton,
    torch_has_it,
)
from dsa_engine.kernels.moe.block_scaled_experts import quantized_words
from dsa_engine.kernels.moe.choose_replicas import Replicas, choose_replicas, choose_replicas_reference
from dsa_engine.kernels.moe.combine import combine, combine_reference
from dsa_engine.kernels.moe.combine_codes import combine_codes, combine_codes_reference
from dsa_engine.kernels.moe.expert_order import expert_order, expert_order_reference
from dsa_engine.kernels.moe.pack_tokens import pack_tokens, pack_tokens_reference
from dsa_engine.kernels.moe.router import route, route_reference
from dsa_engine.kernels.moe.token_ranks import token_ranks, token_ranks_reference
from dsa_engine.kernels.rows.silu_mul import silu_mul, silu_mul_reference
from dsa_engine.kernels.runtime.launch import runs_triton
from kernel_cases.bench import KernelCase
from kernel_cases.inputs import Inputs, Sizes

HIDDEN, INTERMEDIATE, EXPERTS, CHOICES = 7168, 2048, 256, 8
GROUPS, TOP_GROUPS, FACTOR = 8, 4, 2.5


def experts(make: Inputs, sizes: Sizes) -> Iterator[KernelCase]:
    """Products of a rank with 4 of 256 experts (64 ranks) in prefill, and with 4 and 32 (8 ranks) in decode."""
    for groups, rows in sizes.experts:
        row_ends = (torch.arange(1, groups + 1, device=make.device) * (rows // groups)).int()
        yield _gate_up(make, groups, rows, row_ends)
        yield _down(make, groups, rows, row_ends)


def _product(
    x: torch.Tensor,
    weight: torch.Tensor,
    row_ends: torch.Tensor,
    source: torch.Tensor | None = None,
    *,
    gated: bool = False,
) -> torch.Tensor:
    if runs_triton(x):
        return grouped_matmul_triton(x, weight, row_ends, source=source, gated=gated)
    rows = x if source is None else x.index_select(0, source)
    out = grouped_matmul_reference(rows, weight, row_ends.diff(prepend=row_ends.new_zeros(1)))
    return silu_mul_reference(out) if gated else out


def _gate_up(make: Inputs, groups: int, rows: int, row_ends: torch.Tensor) -> KernelCase:
    """Gather, product and gating in one kernel; the baseline does the three one after the other."""
    tokens = max(1, rows // CHOICES)
    x, weight = make.normal(tokens, HIDDEN), make.normal(groups, 2 * INTERMEDIATE, HIDDEN)
    source = torch.randint(tokens, (rows,), device=make.device, dtype=torch.int32)

    def separately() -> torch.Tensor:
        return silu_mul(grouped_matmul_torch(x.index_select(0, source), weight, row_ends))

    return KernelCase(
        "experts: gather, gate and up, SwiGLU",
        shape=f"{rows:,} rows, {groups} experts",
        run=lambda: _product(x, weight, row_ends, source, gated=True),
        flops=4.0 * rows * INTERMEDIATE * HIDDEN,
        bytes=float(x.nbytes + weight.nbytes + rows * INTERMEDIATE * x.element_size()),
        baselines={"torch grouped_mm": separately} if torch_has_it(x, weight) else {},
        product=rows > 64 * groups,
    )


def _down(make: Inputs, groups: int, rows: int, row_ends: torch.Tensor) -> KernelCase:
    x, weight = make.normal(rows, INTERMEDIATE), make.normal(groups, HIDDEN, INTERMEDIATE)
    theirs = {"torch grouped_mm": lambda: grouped_matmul_torch(x, weight, row_ends)}
    return KernelCase(
        "experts: down",
        shape=f"{rows:,} rows, {groups} experts",
        run=lambda: _product(x, weight, row_ends),
        flops=2.0 * rows * INTERMEDIATE * HIDDEN,
        bytes=float(x.nbytes + weight.nbytes + rows * HIDDEN * x.element_size()),
        baselines=theirs if torch_has_it(x, weight) else {},
        product=rows > 64 * groups,
    )


def routing(make: Inputs, sizes: Sizes) -> Iterator[KernelCase]:
    for tokens in (sizes.tokens, *sizes.batches[:3]):
        yield _route(make, tokens)
        yield _order(make, tokens)
        yield _replicas(make, tokens)
        yield _ranks(make, tokens)
        yield _combine(make, tokens)
        yield _combine_codes(make, tokens)
        yield _gate(make, tokens)
        yield _pack(make, tokens)
        yield _pack_replicas(make, tokens)


def _route(make: Inputs, tokens: int) -> KernelCase:
    logits, bias = make.normal(tokens, EXPERTS, dtype=torch.float32), make.normal(EXPERTS, dtype=torch.float32)
    return KernelCase(
        "router",
        shape=f"{tokens} tokens, {EXPERTS} experts",
        run=lambda: route(
            logits, bias, top_k=CHOICES, groups=GROUPS, top_groups=TOP_GROUPS, normalise=True, factor=FACTOR
        ),
        flops=0.0,
        bytes=float(logits.nbytes + tokens * CHOICES * 8),
        baselines={"torch": lambda: route_reference(logits, bias, CHOICES, GROUPS, TOP_GROUPS, True, FACTOR)},
    )


def _order(make: Inputs, tokens: int) -> KernelCase:
    choices = torch.randint(EXPERTS, (tokens, CHOICES), device=make.device, dtype=torch.int32)
    return KernelCase(
        "order of pairs by expert",
        shape=f"{tokens} x {CHOICES}",
        run=lambda: expert_order(choices, EXPERTS),
        flops=0.0,
        bytes=3.0 * choices.nbytes,
        baselines={"torch sort, searchsorted": lambda: expert_order_reference(choices, EXPERTS)},
    )


def _ranks(make: Inputs, tokens: int) -> KernelCase:
    """The ranks of tokens, for 64 ranks with 4 experts each."""
    choices = torch.randint(EXPERTS, (tokens, CHOICES), device=make.device, dtype=torch.int32)
    rank_of = (torch.arange(EXPERTS, device=make.device) // 4).int()
    return KernelCase(
        "ranks that tokens go to",
        shape=f"{tokens} x {CHOICES}",
        run=lambda: token_ranks(choices, rank_of, 64),
        flops=0.0,
        bytes=3.0 * choices.nbytes,
        baselines={"torch": lambda: token_ranks_reference(choices, rank_of, 64)},
    )


def _replicas(make: Inputs, tokens: int) -> KernelCase:
    """The replicas of chosen experts, of which every fourth has two."""
    choices, table = torch.randint(EXPERTS, (tokens, CHOICES), device=make.device, dtype=torch.int32), _table(make)
    return KernelCase(
        "replicas of experts",
        shape=f"{tokens} x {CHOICES}",
        run=lambda: choose_replicas(choices, table, 0),
        flops=0.0,
        bytes=2.0 * choices.nbytes,
        baselines={"torch": lambda: choose_replicas_reference(choices, table, 0)},
    )


def _table(make: Inputs) -> torch.Tensor:
    expert = torch.arange(EXPERTS, device=make.device)
    return torch.stack((1 + (expert % 4 == 0).long(), expert, EXPERTS + expert // 4), dim=1).int()


def _combine(make: Inputs, tokens: int) -> KernelCase:
    y, weights = make.normal(tokens * CHOICES, HIDDEN), make.normal(tokens, CHOICES, dtype=torch.float32)
    rows_of = torch.randperm(tokens * CHOICES, device=make.device).int().view(tokens, CHOICES)
    return KernelCase(
        "weighted sum of experts",
        shape=f"{tokens} tokens",
        run=lambda: combine(y, rows_of, weights),
        flops=2.0 * y.numel(),
        bytes=float(y.nbytes * (1 + 1 / CHOICES)),
        baselines={"torch index_add": lambda: combine_reference(y, rows_of, weights)},
    )


def _combine_codes(make: Inputs, tokens: int) -> KernelCase:
    """Zeros: any words would be codes and scales, also of NaN."""
    width = quantized_words(HIDDEN) or 0
    words = torch.empty(tokens * CHOICES, width, dtype=torch.int32, device=make.device)
    if not make.untouched:
        words.zero_()
    rows_of = torch.randperm(tokens * CHOICES, device=make.device).int().view(tokens, CHOICES)
    return KernelCase(
        "sum of rows in FP8",
        shape=f"{tokens} tokens",
        run=lambda: combine_codes(words, rows_of, HIDDEN, make.dtype),
        flops=2.0 * tokens * CHOICES * HIDDEN,
        bytes=float(words.nbytes + tokens * HIDDEN * make.dtype.itemsize),
        baselines={"torch index_add": lambda: combine_codes_reference(words, rows_of, HIDDEN, make.dtype)},
    )


def _gate(make: Inputs, tokens: int) -> KernelCase:
    gate_up = make.normal(tokens, 2 * 18432)
    return KernelCase(
        "SiLU, mul",
        shape=f"{tokens} x 2 x 18432",
        run=lambda: silu_mul(gate_up),
        flops=4.0 * gate_up.numel(),
        bytes=1.5 * gate_up.nbytes,
        baselines={"torch": lambda: silu_mul_reference(gate_up)},
    )


def _pack(make: Inputs, tokens: int) -> KernelCase:
    x, choices, weights = _choices(make, tokens)
    return KernelCase(
        "tokens and choices in one row",
        shape=f"{tokens} x {HIDDEN}",
        run=lambda: pack_tokens(x, choices, weights),
        flops=0.0,
        bytes=2.0 * (x.nbytes + choices.nbytes + weights.nbytes),
        baselines={"torch": lambda: pack_tokens_reference(x, choices, weights, None, tokens)},
    )


def _pack_replicas(make: Inputs, tokens: int) -> KernelCase:
    """The same with the choice of replicas, as in an all-gather."""
    (x, choices, weights), replicas = _choices(make, tokens), Replicas(_table(make), 0)
    return KernelCase(
        "tokens and chosen replicas in one row",
        shape=f"{tokens} x {HIDDEN}",
        run=lambda: pack_tokens(x, choices, weights, replicas=replicas),
        flops=0.0,
        bytes=2.0 * (x.nbytes + choices.nbytes + weights.nbytes),
        baselines={"torch": lambda: pack_tokens_reference(x, choices, weights, None, tokens, replicas)},
    )


def _choices(make: Inputs, tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    choices = torch.randint(EXPERTS, (tokens, CHOICES), device=make.device, dtype=torch.int32)
    return make.normal(tokens, HIDDEN), choices, make.normal(tokens, CHOICES, dtype=torch.float32)
