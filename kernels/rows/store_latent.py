"""The latent cache row of a token, from the raw output of ``kv_a_proj`` to its slot in one pass.

    row = [RMSNorm(c[:rank]) · weight | RoPE(c[rank:])]        c = compressed, [rank + rope]

Rounded as the two operations round by themselves (:mod:`.rms_norm`, :mod:`.rope`), so that all ways to the cache
give the same row. The format of a pool (:mod:`.formats.row_format`) encodes the rounded row.

Bits of a row: they depend on that row alone.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import triton.language as tl

from dsa_engine.kernels.formats.row_format import LatentFormat
from dsa_engine.kernels.rows.paged import as_pool, check_written, page_and_offset, store_native, store_rows_reference
from dsa_engine.kernels.rows.rms_norm import rms_norm_reference
from dsa_engine.kernels.rows.rope import apply_rope_reference, check_angles, load_angles, load_pairs, store_pairs, turn
from dsa_engine.kernels.runtime import cpu
from dsa_engine.kernels.runtime.integers import cdiv, next_power_of_2
from dsa_engine.kernels.runtime.kernel import kernel
from dsa_engine.kernels.runtime.launch import chip_of, runs_triton
from dsa_engine.kernels.runtime.operation import operation

# Values of the latent part a program: a row of 512 in one warp, which sums it by itself. A multiprocessor holds 32 such
# programs, more bytes in flight than the latency of memory needs.
_TILE, _WARPS = 512, 1


def latent_rows_reference(
    compressed: torch.Tensor, norm_weight: torch.Tensor, eps: float, cos: torch.Tensor, sin: torch.Tensor,
    interleaved: bool,
) -> torch.Tensor:  # fmt: skip
    """``[T, rank + rope]``, as a pool of the dtype of ``compressed`` holds them."""
    latent, k_rope = compressed.split((norm_weight.shape[0], 2 * cos.shape[-1]), dim=-1)
    turned = apply_rope_reference(k_rope, cos, sin, interleaved)
    return torch.cat((rms_norm_reference(latent, norm_weight, eps), turned), dim=-1)


@kernel(do_not_specialize=["count"])
def store_latent_kernel(
    x, weight, cos, sin, pool, slots, count, eps, x_stride, cos_stride, sin_stride, page_stride,
    RANK: tl.constexpr, RANK_PADDED: tl.constexpr, HALF: tl.constexpr, HALF_PADDED: tl.constexpr,
    PAGE_SIZE: tl.constexpr, ROW: tl.constexpr, ROTATED_AT: tl.constexpr, ROWS: tl.constexpr,
    INTERLEAVED: tl.constexpr, FORMAT: tl.constexpr, POWER_OF_TWO: tl.constexpr, CONVERTS: tl.constexpr,
):  # fmt: skip
    """ROWS tokens a program; a row of the pool has ROW elements, the first rotated number at ROTATED_AT."""
    first = tl.program_id(0).to(tl.int64) * ROWS
    row = first + tl.arange(0, ROWS)
    page, offset, keep = page_and_offset(slots, row, count, PAGE_SIZE)
    source, target = x + row[:, None] * x_stride, pool + page * page_stride + offset * ROW

    column = tl.arange(0, RANK_PADDED)[None, :]
    values = tl.load(source + column, mask=keep & (column < RANK), other=0.0)
    a, b = load_pairs(source + RANK, keep, HALF, HALF_PADDED, INTERLEAVED)
    c = load_angles(cos, first, count, cos_stride, ROWS, 1, HALF, HALF_PADDED)
    s = load_angles(sin, first, count, sin_stride, ROWS, 1, HALF, HALF_PADDED)

    full = values.to(tl.float32)
    scale = tl.rsqrt(tl.sum(full * full, axis=1, keep_dims=True) / RANK + eps)
    # Rounded before the weight as well, as the model's definition does.
    latent = tl.load(weight + column, mask=column < RANK, other=0.0) * (full * scale).to(values.dtype)
    a, b = turn(a, b, c, s)
    at_rope, a, b = FORMAT.store(target, column, latent, a, b, keep, RANK, ROTATED_AT, POWER_OF_TWO, CONVERTS)
    store_pairs(at_rope, a, b, keep, HALF, HALF_PADDED, INTERLEAVED)


def _run_native(
    compressed: torch.Tensor, norm_weight: torch.Tensor, eps: float, cos: torch.Tensor, sin: torch.Tensor,
    interleaved: bool, pool: torch.Tensor, slots: torch.Tensor | None,
) -> None:  # fmt: skip
    """Runs ``cpu/rows.cpp``."""
    compressed = compressed if compressed.stride(1) == 1 else compressed.contiguous()
    norm_weight, slots = norm_weight.contiguous(), None if slots is None else slots.contiguous()
    outside = cpu.kernels().dsa_store_latent(
        compressed.data_ptr(), norm_weight.data_ptr(), cos.data_ptr(), sin.data_ptr(), pool.data_ptr(),
        None if slots is None else slots.data_ptr(), cpu.TYPES[compressed.dtype], len(compressed), len(norm_weight),
        cos.shape[1],
        compressed.stride(0), cos.stride(0), sin.stride(0), slots is not None and slots.dtype == torch.int64,
        pool.shape[0], pool.shape[1], pool.stride(0), interleaved, eps, cpu.row_threads(compressed.numel()),
    )  # fmt: skip
    check_written(outside, pool)


def _numbers(given: dict[str, Any], result: None) -> list[torch.Tensor] | None:
    """The rows of a destination with codes as numbers."""
    row_format: LatentFormat = given["row_format"]
    return [row_format.unpack(given["out"])] if row_format.coded else None


@operation(writes=("out",), runs=cpu.runs_kernel, decoded=_numbers, waits=True)
def store_latent(
    compressed: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    out: torch.Tensor,
    slots: torch.Tensor | None = None,
    *,
    row_format: LatentFormat,
    interleaved: bool,
) -> None:
    """Norms, rotates and writes the latent rows of T tokens.

    Args:
        compressed: ``[T, rank + rope]``, the output of kv_a_proj; rows with any stride.
        norm_weight: ``[rank]``.
        cos, sin: float32 ``[T, rope / 2]``.
        out: a pool ``[pages, page_size, width]``, or without slots plain rows ``[T, width]`` with any row stride. The
            width and dtype are ``columns`` and ``pool_dtype`` of ``row_format``.
        slots: ``[T]`` int32 or int64; tokens with slot −1 are dropped.
        interleaved: see :mod:`.rope`.

    Raises:
        IndexError: on a CPU, slots outside of the pool.
    """
    tokens, rank, rope = compressed.shape[0], norm_weight.shape[0], 2 * cos.shape[-1]
    if compressed.dim() != 2 or compressed.shape[1] != rank + rope:
        raise ValueError(
            f"compressed {tuple(compressed.shape)} must be [T, rank + rope], with {rank} norm weights and {rope} "
            "rotated columns"
        )
    check_angles(cos, sin, tokens)
    if (row_format.rank, row_format.rope, row_format.pool_dtype) != (rank, rope, out.dtype):
        raise ValueError(f"rows of {rank} + {rope} numbers in {out.dtype} do not have the format {row_format}")
    pool = as_pool(out, slots, tokens, row_format.columns, row_format.alignment)

    def store(rows: torch.Tensor) -> None:
        store_rows_reference(pool, row_format.pack(rows), slots)

    if cpu.serves(compressed, norm_weight) and cpu.serves(cos, sin):
        run = partial(_run_native, compressed, norm_weight, eps, cos, sin, interleaved)
        store_native(run, store, pool, slots, compressed, rank + rope)
    elif not runs_triton(compressed):
        store(latent_rows_reference(compressed, norm_weight, eps, cos, sin, interleaved))
    elif tokens:
        compressed = compressed if compressed.stride(1) == 1 else compressed.contiguous()
        padded = next_power_of_2(rank)
        at_once = max(1, _TILE // padded)
        store_latent_kernel[(cdiv(tokens, at_once),)](
            compressed, norm_weight, cos, sin, pool, slots, tokens, eps,
            compressed.stride(0), cos.stride(0), sin.stride(0), pool.stride(0),
            RANK=rank, RANK_PADDED=padded, HALF=rope // 2, HALF_PADDED=next_power_of_2(rope // 2),
            PAGE_SIZE=0 if slots is None else pool.shape[1], ROW=row_format.columns,
            ROTATED_AT=row_format.rotated_at, ROWS=at_once, INTERLEAVED=interleaved, FORMAT=row_format.helpers,
            POWER_OF_TWO=row_format.power_of_two, CONVERTS=chip_of(compressed).converts_e4m3, num_warps=_WARPS,
        )  # fmt: skip
