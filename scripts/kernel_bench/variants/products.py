"""Products of few rows, in decode: weights on their way before the input is there, and W_UK and W_UV in FP8.

Timed in CUDA graphs, as steps are: shorter gaps show between launches only. Expected figures are an H100's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsa_engine.kernels.formats.e4m3 import decode_e4m3
from dsa_engine.kernels.grouped.grouped_matmul_fp8 import block_fp8
from dsa_engine.kernels.indexer.topk import select_topk
from dsa_engine.kernels.linear import block_scaled_matmul as engine
from dsa_engine.kernels.linear.per_head_matmul import per_head_matmul
from dsa_engine.kernels.moe.expert_mlp import expert_mlp
from dsa_engine.kernels.runtime.integers import cdiv
from dsa_engine.kernels.runtime.kernel import kernel
from dsa_engine.kernels.runtime.launch import INTERPRETED, chip_of, dot_precision, runs_triton
from kernel_cases.inputs import RANK, TOPK, Call, Inputs, KernelCase, Sizes

BLOCK, HOPPER = 128, 90  # griddepcontrol and bulk prefetches are Hopper's; the interpreter has neither
_BLOCK, _matmul = tl.constexpr(BLOCK), engine.block_scaled_matmul_kernel


@triton.jit
def _ask(address, size):
    """Asks for ``size`` bytes from each address to be brought into L2: multiples of 16. Nothing waits for them."""
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;", "=r,l,r", [address.to(tl.int64), size],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@kernel
def product_ahead_kernel(
    x, weight, weight_scale, out, parts, finished, rows, width, inner, x_stride, part_stride,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, WHOLE: tl.constexpr, SWAPPED: tl.constexpr, BAND: tl.constexpr,
    CONVERTS: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """The engine's kernel for one tile of rows. Until the launch before has ended, whose result is x, the program's
    weights come into L2: no farther than x itself, then. A multiprocessor has room for 3 programs of any launches."""
    if AHEAD:
        tl.extra.cuda.gdc_launch_dependents()
        begin = inner // _BLOCK * tl.program_id(1) // tl.num_programs(1)
        end = inner // _BLOCK * (tl.program_id(1) + 1) // tl.num_programs(1)
        row = tl.minimum(tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS), width - 1).to(tl.int64)
        _ask(weight + row * inner + begin * _BLOCK, (end - begin) * _BLOCK)
        tl.extra.cuda.gdc_wait()  # all launches before have ended: that one has waited too
    _matmul(
        x, None, weight, weight_scale, out, parts, finished, rows, width, inner, x_stride, 0, part_stride,
        ROWS, COLUMNS, WHOLE, SWAPPED, BAND, False, CONVERTS,
    )  # fmt: skip


def product_ahead(x: Tensor, weight: Tensor, scale: Tensor, finished: Tensor, programs: int = 2) -> Tensor:
    """:func:`block_scaled_linear` of up to 16 rows and whole blocks, by up to ``programs`` a multiprocessor."""
    if not runs_triton(x):
        return engine.block_scaled_linear(x, weight, scale)
    (rows, inner), width = x.shape, weight.shape[0]
    (tiles, _), constants = engine._plan(rows, width, inner, chip_of(x), False)
    splits = engine.splits_for(tiles, cdiv(inner, BLOCK), programs * chip_of(x).multiprocessors)
    out, parts = x.new_empty(rows, width), x.new_empty(splits, rows, width, dtype=torch.float32)
    product_ahead_kernel[(tiles, splits)](
        x, weight, scale, out, parts if splits > 1 else None, finished, rows, width, inner, x.stride(0), rows * width,
        AHEAD=not INTERPRETED, launch_pdl=True, **constants,
    )  # fmt: skip
    return out


@kernel
def prefetch_rows_kernel(matrix, rows, stride, SIZE: tl.constexpr):
    for first in range(tl.program_id(0) * 32, rows, tl.num_programs(0) * 32):
        row = tl.minimum(first + tl.arange(0, 32), rows - 1)
        _ask(matrix + row.to(tl.int64) * stride, SIZE)


def prefetch_rows(*matrices: Tensor) -> None:
    """Asks for matrices, whose rows may lie apart, by few programs, as a collective or top-k runs beside them."""
    for matrix in matrices:
        if runs_triton(matrix) and not INTERPRETED:
            prefetch_rows_kernel[(16,)](matrix, len(matrix), matrix.stride(0), SIZE=matrix[0].nbytes, num_warps=1)


@kernel
def per_head_fp8_kernel(
    x, weight, weight_scale, out, tokens, x_row, x_head, weight_head, weight_in, weight_out, scale_head, scale_in,
    scale_out, out_row, out_head,
    BLOCKS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, CONVERTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A head's tile ``[ROWS, COLUMNS]`` a program; x is not rounded to FP8."""
    head, start, row = tl.program_id(0), tl.program_id(1) * COLUMNS, tl.arange(0, ROWS)[:, None]
    column, inside = start + tl.arange(0, COLUMNS)[None, :], row < tokens
    scale_at = weight_scale + head * scale_head + start // _BLOCK * scale_out
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for block in tl.static_range(BLOCKS):
        depth = block * _BLOCK + tl.arange(0, _BLOCK)
        code = tl.load(weight + head * weight_head + depth[:, None] * weight_in + column * weight_out)
        x_tile = tl.load(x + row * x_row + head * x_head + depth[None, :], mask=inside, other=0.0)
        numbers = decode_e4m3(code, CONVERTS).to(x_tile.dtype)  # exact
        total += tl.dot(x_tile, numbers, input_precision=PRECISION) * tl.load(scale_at + block * scale_in)
    tl.store(out + row * out_row + head * out_head + column, total.to(out.dtype.element_ty), mask=inside)


def per_head_fp8(x: Tensor, weight: Tensor, scale: Tensor, out: Tensor) -> None:
    """:func:`per_head_matmul` of up to 16 tokens by float8_e4m3fn ``weight [heads, in, out]`` with float32 scales
    ``[heads, in / 128, out / 128]``, both strided as they may be."""
    if not runs_triton(x):
        whole = scale.repeat_interleave(BLOCK, 1).repeat_interleave(BLOCK, 2)
        return per_head_matmul(x, weight.float().mul_(whole).to(x.dtype), out)
    (tokens, heads, inner), chip = x.shape, chip_of(x)
    columns = 128 if inner == BLOCK else 64  # 16 or 32 KB of codes a program
    per_head_fp8_kernel[(heads, weight.shape[2] // columns)](
        x, weight.view(torch.uint8), scale, out, tokens, *x.stride()[:2], *weight.stride(), *scale.stride(),
        *out.stride()[:2], BLOCKS=inner // BLOCK, ROWS=16, COLUMNS=columns, CONVERTS=chip.converts_e4m3,
        PRECISION=dot_precision(x.dtype), num_warps=4,
    )  # fmt: skip


def variant_products(make: Inputs, sizes: Sizes) -> Iterator[KernelCase]:
    full = sizes.tokens > 1024
    for rows in (1, 4):
        yield _chain(make, rows, 1 if full else 8)
        yield from (_by_head(make, name, rows, 128 if full else 2) for name in ("W_UK", "W_UV"))
    yield _under_topk(make, sizes.contexts[-1], 128 if full else 2)
    yield _under_an_exchange(make, *((4, 2048, 7168) if full else (2, 128, 512)))


def _weight(make: Inputs, *shape: int) -> tuple[Tensor, Tensor]:
    return make.fp8(*shape), make.scales(*shape[:-2], *(cdiv(size, BLOCK) for size in shape[-2:]))


def _chain(make: Inputs, rows: int, less: int) -> KernelCase:
    """Expected, not measured: 110 us instead of 120, 1.3 us less a launch; 26 a layer are 2 ms of a decode step."""
    # Blocks of output and input width of q_b, o of one of 8 ranks, gate and up of a shared expert, and its down; each
    # time other weights, 193 MB, which L2 does not hold.
    shapes = 2 * ((192, 12), (56, 16), (32, 56), (56, 16))
    weights = [_weight(make, *(cdiv(blocks, less) * BLOCK for blocks in shape)) for shape in shapes]
    x, finished = make.normal(rows, weights[0][0].shape[1]), engine.no_program_finished(weights[0][0])

    def multiply(product: Callable[..., Tensor], y: Tensor = x) -> Tensor:
        for weight, scale in weights:
            y = product(y[:, : weight.shape[1]], weight, scale, finished=finished)
        return y

    others = {"the engine's": engine.block_scaled_linear, "3 programs": partial(product_ahead, programs=3)}
    baselines = {name: _graphed(x, multiply, way) for name, way in others.items()}
    shape, size = f"{rows} rows, {len(weights)} products", float(sum(weight.nbytes for weight, _ in weights))
    return KernelCase("launches ahead", shape, _graphed(x, multiply, product_ahead), size, 0, baselines, needs=HOPPER)


def _under_topk(make: Inputs, context: int, heads: int) -> KernelCase:
    """o of one of 8 ranks, and W_UV. Expected, not measured: 38 us instead of 46."""
    scores, lengths = make.floats(1, context), torch.full((1,), context, dtype=torch.int32, device=make.device)
    w_uv, latent, out = make.normal(heads, BLOCK, RANK), make.normal(1, heads, RANK), make.normal(1, heads, BLOCK)
    (weight, scale), x = _weight(make, 56 * heads, 16 * heads), make.normal(1, 16 * heads)
    wait = partial(select_topk, scores, min(TOPK, context), lengths, finished=make.zeros(1, dtype=torch.int32))
    product = partial(engine.block_scaled_linear, x, weight, scale, finished=engine.no_program_finished(x))
    products = (partial(per_head_matmul, latent, w_uv.mT, out), product)
    return _prefetched("prefetch under top-k", x, (w_uv.flatten(0, 1), weight), wait, products, scores, w_uv, weight)


def _under_an_exchange(make: Inputs, experts: int, width: int, hidden: int) -> KernelCase:
    """A quarter of gate and up, while the device waits for 115 us. Expected, not measured: 185 us instead of 195."""
    x, ids, weights = make.normal(8, hidden), make.whole(experts, 8, 8), make.floats(8, 8)
    gate_up, down = _weight(make, experts, 2, width, hidden), _weight(make, experts, hidden, width)
    wait = partial(torch.cuda._sleep, 200_000) if x.is_cuda else lambda: None
    product = partial(expert_mlp, x, ids, weights, gate_up, down, block_fp8(True, hidden))
    quarter = gate_up[0].flatten(0, 2)[:, : hidden // 4]
    return _prefetched("prefetch under an exchange", x, (quarter,), wait, (product,), gate_up[0], down[0])


def _prefetched(
    what: str, x: Tensor, matrices: Sequence[Tensor], wait: Call, products: Sequence[Call], *inputs: Tensor
) -> KernelCase:
    """What the products read is asked for on another stream, while ``wait`` runs before them."""
    other = torch.cuda.Stream(x.device) if x.is_cuda else None

    def run(*asked: Tensor) -> Any:
        if other is not None:
            other.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(other):
            prefetch_rows(*asked)
        wait()
        if other is not None:
            torch.cuda.current_stream().wait_stream(other)
        return [product() for product in products]

    asked, size = (float(sum(tensor.nbytes for tensor in tensors)) for tensors in (matrices, inputs))
    way, without = _graphed(x, run, *matrices), {"without": _graphed(x, run)}
    return KernelCase(what, f"{asked / 1e6:.0f} MB", way, size, baselines=without, needs=HOPPER)


def _by_head(make: Inputs, name: str, rows: int, heads: int) -> KernelCase:
    """Expected, not measured: 6 us instead of 8.7, as 8.4 MB are read instead of 16.8."""
    both = (*_weight(make, heads, BLOCK, RANK), make.normal(heads, BLOCK, RANK))
    weight, scale, plain = both if name == "W_UK" else (matrix.mT for matrix in both)
    x, out = make.normal(rows, heads, weight.shape[1]), make.normal(rows, heads, weight.shape[2])
    run, ours = partial(per_head_fp8, x, weight, scale, out), partial(per_head_matmul, x, plain, out)
    size, shape = float(weight.nbytes + x.nbytes + out.nbytes), f"{rows} rows, {heads} heads"
    return KernelCase(f"{name} in FP8", shape, run, bytes=size, baselines={"in the run's dtype": ours}, needs=HOPPER)


def _graphed(x: Tensor, call: Callable[..., Any], *args: Any) -> Call:
    """The kernels of a call in a CUDA graph, which the first run captures; not those of references, and on a CPU."""

    @cache
    def captured() -> torch.cuda.CUDAGraph:
        call(*args)
        with torch.cuda.graph(graph := torch.cuda.CUDAGraph()):
            call(*args)
        return graph

    return lambda: captured().replay() if x.is_cuda and runs_triton(x) else call(*args)
