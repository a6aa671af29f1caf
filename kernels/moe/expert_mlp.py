"""The experts of one rank, the same for every weight format: pairs of tokens and experts are sorted by expert, the
format's products run over the rows of each expert, and the weighted results of a token are summed.

    h[r] = silu(gate[e] · x[t]) · (up[e] · x[t])
    out[t] = Σ_j topk_weights[t, j] · down[e] · h[r(t, j)]       e = topk_ids[t, j];  −1: another rank's

x and h are quantised as the format says. In FP8 h is quantised straight from float32, and rounded nowhere between.

Bits of a token: of the CPU's kernel they depend on the token and its pairs in their order alone; of Triton's kernels as
:mod:`.grouped.grouped_matmul` says. Many rows on a CPU take PyTorch's products, but under
:func:`.launch.batch_invariance` the CPU's kernel too.
"""

from __future__ import annotations

from typing import Any

import torch

from dsa_engine.kernels.grouped.grouped_matmul import PLAIN
from dsa_engine.kernels.grouped.grouped_matmul_fp8 import dequantize_rows
from dsa_engine.kernels.grouped.grouped_matmul_int8 import INT8
from dsa_engine.kernels.grouped.products import Groups, ProductFormat, Weight, codes_of
from dsa_engine.kernels.moe.combine import combine
from dsa_engine.kernels.moe.expert_order import expert_order, local_topk_ids
from dsa_engine.kernels.rows.silu_mul import silu_mul_reference
from dsa_engine.kernels.runtime import cpu
from dsa_engine.kernels.runtime.launch import runs_triton
from dsa_engine.kernels.runtime.operation import operation

# Largest number of bytes of rows between the products for which every pair gets a row, local or not: the host need not
# know how many are local. That is 14,500 pairs of DeepSeek-V3.2: any decode. More pairs are counted, which waits for
# the device unless the dispatch has counted them.
UNCOUNTED_BYTES = 1 << 29

# Largest average number of rows of an expert for the CPU's kernel, which reads weights once and multiplies rows less
# well than PyTorch's products.
_FEW_ROWS_ON_A_CPU = 8
_NATIVE_NUMBERS = 1 << 26  # the most that it holds between the products


def expert_mlp_reference(
    x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, gate_up: Weight, down: Weight,
    product: ProductFormat, dtype: torch.dtype,
) -> torch.Tensor:  # fmt: skip
    chosen = topk_ids.flatten()
    local = chosen.shape[0] if chosen.numel() == 0 else int((chosen >= 0).sum())
    # A stable sort, with the pairs of other ranks first: the tail is sorted by expert and then by token.
    order = chosen.argsort(stable=True)[chosen.shape[0] - local :]
    tokens = order // topk_ids.shape[1]
    counts = torch.bincount(chosen[order], minlength=len(codes_of(down))).tolist()
    gated = product.multiply_reference(x.index_select(0, tokens), gate_up, counts, product.gate_dtype or dtype)
    y = product.multiply_reference(silu_mul_reference(gated), down, counts, dtype)
    out = torch.zeros(len(x), y.shape[1], dtype=torch.float32, device=x.device)
    out.index_add_(0, tokens, y.float().mul_(topk_weights.flatten()[order, None]))
    return out.to(dtype)


def _run_native(
    x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, gate_up: Weight, down: Weight,
    product: ProductFormat, dtype: torch.dtype,
) -> torch.Tensor:  # fmt: skip
    """Runs ``cpu/expert_mlp.cpp``: a thread takes an expert at a time."""
    x_type = cpu.ROUNDED if x.dtype == torch.int32 else cpu.TYPES[x.dtype]
    (tokens, k), (count, hidden, packed) = topk_ids.shape, codes_of(down).shape
    x = _made_rows(x, product, hidden) if x.dtype == torch.int32 else x.contiguous()
    intermediate = packed * product.packed
    library = cpu.kernels()
    out = torch.empty(tokens, hidden, dtype=dtype)
    scales = [None if len(weight) < 2 else weight[1] for weight in (gate_up, down)]
    groups = [0 if s is None else n // s.shape[-1] for s, n in zip(scales, (hidden, intermediate), strict=True)]
    pointers = [None if s is None else s.data_ptr() for s in scales]
    threads = min(count, cpu.threads_for(3 * topk_ids.numel() * hidden * intermediate))
    size = library.dsa_expert_mlp_scratch(tokens, topk_ids.numel(), count, hidden, intermediate)
    scratch = torch.empty(size, dtype=torch.uint8)
    outside = library.dsa_expert_mlp(
        x.data_ptr(), topk_ids.data_ptr(), topk_weights.data_ptr(), codes_of(gate_up).data_ptr(), pointers[0],
        codes_of(down).data_ptr(), pointers[1], out.data_ptr(), scratch.data_ptr(), x_type, cpu.TYPES[dtype],
        product.native, cpu.TYPES[x.dtype if scales[0] is None else scales[0].dtype], *groups, product.power_of_two,
        tokens, k, count, hidden, intermediate, threads,
    )  # fmt: skip
    if outside:
        raise IndexError(f"topk_ids must be below {count}, the number of experts here, not {int(topk_ids.max())}")
    return out


def _made_rows(words: torch.Tensor, product: ProductFormat, hidden: int) -> torch.Tensor:
    """Rows of tokens that came as codes and scales, as ``make_row`` of ``cpu/products.h`` makes them."""
    codes, scales = product.quantize(words)
    if codes is None or scales is None or codes.shape[1] != hidden:
        raise ValueError(f"quantised tokens of {hidden} numbers are not {tuple(words.shape)}")
    if product is INT8:
        return torch.cat((words, codes.sum(dim=1, dtype=torch.int32)[:, None]), dim=1)
    return codes * scales[:, None] if scales.dim() == 1 else dequantize_rows(codes, scales)


def _of_codes(given: dict[str, Any], result: torch.Tensor | None) -> list[torch.Tensor] | None:
    """With products of codes rounding decides which number some of those between the products become."""
    return None if given["product"] is PLAIN or result is None else [result]


@operation(runs=cpu.runs_kernel, decoded=_of_codes, waits=True)
def expert_mlp(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    gate_up: Weight,
    down: Weight,
    product: ProductFormat = PLAIN,
    *,
    dtype: torch.dtype | None = None,
    first: int | None = None,
    local_fraction: float = 1.0,
    local_pairs: int | None = None,
    uncounted_bytes: int = UNCOUNTED_BYTES,
) -> torch.Tensor:
    """Weighted sum of the chosen experts' outputs for every token.

    Sums add in the order of a token's pairs, so that a result is the same bits each time. On a CPU few rows (8, on
    average) take the CPU's kernel, which reads the weights as they are stored.

    Args:
        x: ``[T, hidden]``; for products of codes also words of :func:`.quantize.quantize_tokens` or
            :func:`.int8.int8_words`, with the same result.
        topk_ids: ``[T, k]`` int32 numbers within this rank's experts, −1 for experts of other ranks.
        topk_weights: ``[T, k]`` float32.
        gate_up: parts of a weight ``[experts, 2 · intermediate, hidden]``, in FP8 ``[experts, 2, intermediate,
            hidden]``, gate before up, as the kernel of the format takes them (:mod:`.grouped.products`).
        down: parts of a weight ``[experts, hidden, intermediate]``.
        dtype: of the result; default: x's.
        first: number of this rank's first expert, if experts are numbered over all ranks; −1 need not mark others then.
        local_fraction: expected fraction of the pairs whose experts are here: chooses the kernel, never the result.
        local_pairs: number of pairs whose experts are here, where the host knows it.
        uncounted_bytes: largest number of bytes of rows for which pairs of other ranks get rows too, so that
            nothing waits for the device (decode, CUDA graphs).

    Returns:
        ``[T, hidden]``, summed in float32; zeros for a token without experts here.

    Raises:
        IndexError: on a CPU, experts that are not here.
    """
    _check(x, topk_ids, topk_weights, gate_up, down, product, dtype)
    dtype, (count, hidden, packed) = dtype or x.dtype, codes_of(down).shape
    if not runs_triton(x):
        topk_ids = local_topk_ids(topk_ids, count, first)
        few = cpu.takes(topk_ids.numel(), _FEW_ROWS_ON_A_CPU * count) and dtype in cpu.TYPES
        if few and cpu.serves(topk_weights, dtype=torch.float32) and product.on_a_cpu(dtype, gate_up, down):
            topk_ids, topk_weights = topk_ids.int().contiguous(), topk_weights.contiguous()
            of_pair = codes_of(gate_up).shape[1:-1].numel() + codes_of(down).shape[1]
            step = max(1, _NATIVE_NUMBERS // (topk_ids.shape[1] * of_pair))
            parts = zip(x.split(step), topk_ids.split(step), topk_weights.split(step), strict=True)
            sums = [_run_native(*part, gate_up, down, product, dtype) for part in parts]
            return sums[0] if len(sums) == 1 else torch.cat(sums)
        cpu.refuse_variant(topk_weights, f"experts of {product.codes or dtype} with a layout or an order of columns")
        return expert_mlp_reference(x, topk_ids, topk_weights, gate_up, down, product, dtype)

    tokens, row_ends, pair_rows = expert_order(topk_ids, count, first)
    row_bytes = product.copies * (packed * product.packed + hidden) * dtype.itemsize
    # Nothing is gained by counting where all are local.
    if local_pairs is None and local_fraction < 1 and topk_ids.numel() * row_bytes > uncounted_bytes:
        local_pairs = int(row_ends[-1])
    expected = local_fraction * topk_ids.numel() if local_pairs is None else local_pairs
    gather = Groups(row_ends, tokens if local_pairs is None else tokens[:local_pairs], gated=True, expected=expected)
    # Nothing names the rows between the products: their memory is free when the results are summed.
    y = product.multiply(product.multiply(x, gate_up, gather, dtype), down, Groups(row_ends, expected=expected), dtype)
    return combine(y, pair_rows, topk_weights)


def _check(
    x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, gate_up: Weight, down: Weight,
    product: ProductFormat, dtype: torch.dtype | None,
) -> None:  # fmt: skip
    if topk_ids.shape != topk_weights.shape or topk_ids.shape[0] != x.shape[0]:
        raise ValueError(
            f"x {tuple(x.shape)}, topk_ids {tuple(topk_ids.shape)}, topk_weights {tuple(topk_weights.shape)} do not fit"
        )
    up, (count, hidden, packed) = codes_of(gate_up), codes_of(down).shape
    intermediate = packed * product.packed
    halves = (2, intermediate) if up.dim() == 4 else (2 * intermediate,)
    words = x.dtype == torch.int32
    if words and dtype is None:
        raise ValueError("quantised tokens do not say the dtype of the result; give dtype")
    if up.shape != (count, *halves, hidden // product.packed) or (x.shape[1] != hidden and not words):
        raise ValueError(f"x {tuple(x.shape)}, gate_up {tuple(up.shape)}, down {(count, hidden, packed)} do not fit")
