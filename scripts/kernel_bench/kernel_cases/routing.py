"""Routing: DeepSeek-V3.2 under expert parallelism, balanced."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from dsa_engine.kernels.formats.quantize import quantized_words
from dsa_engine.kernels.moe.choose_replicas import Replicas, choose_replicas
from dsa_engine.kernels.moe.combine import combine
from dsa_engine.kernels.moe.combine_codes import combine_codes
from dsa_engine.kernels.moe.expert_order import expert_order
from dsa_engine.kernels.moe.pack_tokens import pack_tokens
from dsa_engine.kernels.moe.router import route
from dsa_engine.kernels.moe.token_ranks import token_ranks
from dsa_engine.kernels.rows.silu_mul import silu_mul
from kernel_cases.inputs import HIDDEN, Inputs, KernelCase, Sizes

EXPERTS, TOP_K, RANKS = 256, 8, 64
V3: dict[str, Any] = {"top_k": TOP_K, "groups": 8, "top_groups": 4, "normalise": True, "factor": 2.5}


def routing(make: Inputs, sizes: Sizes) -> Iterator[KernelCase]:
    expert = torch.arange(EXPERTS, device=make.device)
    rank_of = (expert // (EXPERTS // RANKS)).int()
    # Every fourth expert has two replicas.
    table = torch.stack((1 + (expert % 4 == 0).long(), expert, EXPERTS + expert // 4), dim=1).int()
    for tokens in (sizes.tokens, *sizes.batches[:3]):
        logits, bias, topk_ids = make.floats(tokens, EXPERTS), make.floats(EXPERTS), make.whole(EXPERTS, tokens, TOP_K)
        pairs, shape = tokens * TOP_K, f"{tokens} x {TOP_K}"
        route_v3 = partial(route, logits, bias, **V3)
        yield KernelCase("router", f"{tokens} tokens", route_v3, bytes=logits.nbytes + 8 * pairs)
        for count in (EXPERTS, EXPERTS // RANKS):
            order = partial(expert_order, topk_ids, count)
            yield KernelCase("order of pairs by expert", f"{shape} of {count}", order, bytes=3 * topk_ids.nbytes)
        replicas = partial(choose_replicas, topk_ids, table, 0)
        yield KernelCase("replicas of experts", shape, replicas, bytes=2 * topk_ids.nbytes)
        ranks = partial(token_ranks, topk_ids, rank_of, RANKS)
        yield KernelCase("ranks that tokens go to", shape, ranks, bytes=3 * topk_ids.nbytes)

        y, topk_weights, rows_of = make.normal(pairs, HIDDEN), make.floats(tokens, TOP_K), make.order(pairs)
        rows_of = rows_of.view(tokens, TOP_K)
        weighted = partial(combine, y, rows_of, topk_weights)
        moved = y.nbytes * (1 + 1 / TOP_K)
        yield KernelCase("weighted sum of experts", f"{tokens} tokens", weighted, bytes=moved, flops=2.0 * y.numel())
        # Zeros: random words would be codes and scales of NaN too.
        words = make.zeros(pairs, quantized_words(HIDDEN) or 0, dtype=torch.int32)
        summed = partial(combine_codes, words, rows_of, HIDDEN, make.dtype)
        moved = words.nbytes + tokens * HIDDEN * make.dtype.itemsize
        yield KernelCase("sum of rows in FP8", f"{tokens} tokens", summed, bytes=moved, flops=2.0 * y.numel())

        gate_up = make.normal(tokens, 2 * 18432)
        gate = partial(silu_mul, gate_up)
        yield KernelCase("SiLU, mul", f"{tokens} x 2 x 18432", gate, bytes=1.5 * gate_up.nbytes)
        x = make.normal(tokens, HIDDEN)
        moved = 2 * (x.nbytes + topk_ids.nbytes + topk_weights.nbytes)
        for name, chosen in (("", None), (" and chosen replicas", Replicas(table, 0))):
            pack = partial(pack_tokens, x, topk_ids, topk_weights, replicas=chosen)
            yield KernelCase(f"tokens{name} in one row", f"{tokens} x {HIDDEN}", pack, bytes=moved)
