"""Block-scaled FP8 products against float64 sums of the same codes and scales."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from dsa_engine.kernels.formats.fp8 import quantize_blocks
from dsa_engine.kernels.formats.quantize import codes_and_scales, fill_words, quantize_rows
from dsa_engine.kernels.grouped import grouped_matmul_fp8
from dsa_engine.kernels.linear import block_scaled_matmul as module
from dsa_engine.kernels.linear.block_scaled_matmul import (
    QUANTISED_ROWS,
    block_scaled_linear,
    block_scaled_matmul_triton,
    no_program_finished,
    words_for,
)
from dsa_engine.kernels.runtime.launch import INTERPRETED, runs_triton

pytestmark = pytest.mark.usefixtures("on_a_cpu")

Error = Callable[[torch.Tensor, torch.Tensor], float]
SPLITS = 9  # one more than are loaded together


def spread(*shape: int, seed: int) -> torch.Tensor:
    """Numbers of many sizes, so that every block has its own scale."""
    g = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=g) * torch.randn(*shape[:-1], 1, generator=g).exp()


def naive(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, power_of_two: bool) -> torch.Tensor:
    """float64 ``[R, out]``: block by block, as the definition says."""
    codes, x_scale = (t.cpu() for t in quantize_rows(x, 128, power_of_two))
    weight, scale = weight.cpu(), scale.cpu()
    out = torch.zeros(x.shape[0], weight.shape[0], dtype=torch.float64)
    for b in range(scale.shape[1]):
        inner = slice(128 * b, 128 * (b + 1))
        for n in range(scale.shape[0]):
            part = slice(128 * n, 128 * (n + 1))
            product = codes[:, inner].double() @ weight[part, inner].double().t()
            out[:, part] += x_scale[:, b, None].double() * scale[n, b].double() * product
    return out


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize(
    "rows, out, inner", [(1, 128, 128), (5, 70, 300), (20, 200, 160), (130, 260, 96), (3, 8, 1200)]
)
def test_against_float64(
    rows: int, out: int, inner: int, power_of_two: bool, dtype: torch.dtype, bound: float, fp8_sum_bound: float,
    device: str, relative_error: Error,
) -> None:  # fmt: skip
    """Few and many rows, partial blocks and tiles at every edge, and sums in several parts."""
    x = spread(rows, inner, seed=0).to(device, dtype)
    weight, scale = (t.to(device) for t in quantize_blocks(spread(out, inner, seed=1), (128, 128)))
    y = block_scaled_linear(x, weight, scale, power_of_two=power_of_two)
    assert y.shape == (rows, out) and y.dtype == dtype
    assert relative_error(y, naive(x, weight, scale, power_of_two)) < max(bound, fp8_sum_bound)


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("rows, out, inner", [(1, 70, 300), (16, 260, 96), (3, 8, 1200)])
def test_rows_that_the_product_quantises(
    rows: int, out: int, inner: int, power_of_two: bool, dtype: torch.dtype, device: str
) -> None:
    """The same bits as codes and scales made before; also from rows that lie apart, and of zeros."""
    if not runs_triton(torch.empty(0, device=device)):
        pytest.skip("the kernel runs on CUDA or in Triton's interpreter")
    x = spread(rows, inner + 16, seed=0).to(device, dtype)[:, :inner]
    x[-1, : inner // 2] = 0
    weight, scale = (t.to(device) for t in quantize_blocks(spread(out, inner, seed=1), (128, 128)))
    once = block_scaled_matmul_triton(x, None, weight, scale, dtype, power_of_two)
    codes = quantize_rows(x, 128, power_of_two)
    assert once.any() and torch.equal(once, block_scaled_matmul_triton(*codes, weight, scale, dtype))
    assert rows <= QUANTISED_ROWS and torch.equal(
        once, block_scaled_linear(x, weight, scale, power_of_two=power_of_two)
    )
    many = x.repeat(QUANTISED_ROWS + 1, 1)
    words = words_for(many, inner)  # codes and scales of a row side by side
    assert words is not None and words_for(x, inner) is None and words_for(many, 31) is None
    fill_words(many, words, power_of_two)
    given = {"power_of_two": power_of_two, "quantized": codes_and_scales(words, inner)}
    assert torch.equal(
        block_scaled_linear(many, weight, scale, **given),
        block_scaled_linear(many, weight, scale, power_of_two=power_of_two),
    )


@pytest.mark.parametrize("rows, out", [(5, 140), (20, 70)])
def test_programs_that_share_a_sum(
    rows: int, out: int, dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last to finish adds the parts, in order: the same bits as those of products over a part each, added after.
    It leaves the counts as they were, for products of other sizes."""
    if not runs_triton(torch.empty(0, device=device)):
        pytest.skip("the kernel runs on CUDA or in Triton's interpreter")
    weight, scale = (t.to(device) for t in quantize_blocks(spread(out, 1200, seed=1), (128, 128)))
    x, x_scale = quantize_rows(spread(rows, 1200, seed=0).to(device), 128)
    finished, blocks = no_program_finished(x), scale.shape[1]
    monkeypatch.setattr(module, "splits_for", lambda *_: SPLITS)
    shared = [block_scaled_matmul_triton(x, x_scale, weight, scale, dtype, finished=finished) for _ in range(2)]
    monkeypatch.setattr(module, "splits_for", lambda *_: 1)
    total = torch.zeros(rows, out, device=device)
    bounds = [blocks * split // SPLITS for split in range(SPLITS + 1)]
    for first, last in zip(bounds[:-1], bounds[1:], strict=True):
        columns, part = slice(128 * first, 128 * last), slice(first, last)
        operands = (x[:, columns], x_scale[:, part], weight[:, columns], scale[:, part])
        total += block_scaled_matmul_triton(*(t.contiguous() for t in operands), torch.float32)
    assert total.any() and all(torch.equal(once, total.to(dtype)) for once in shared) and not finished.any()


def test_views_and_leading_dimensions(device: str) -> None:
    weight, scale = (t.to(device) for t in quantize_blocks(spread(140, 96, seed=3), (128, 128)))
    wide = spread(2, 6, 128, seed=4).to(device)
    x = wide[..., 16:112]
    y = block_scaled_linear(x, weight, scale)
    assert y.shape == (2, 6, 140)
    assert torch.equal(y, block_scaled_linear(x.reshape(12, 96).clone(), weight, scale).view(2, 6, 140))
    assert block_scaled_linear(x[:0], weight, scale).shape == (0, 6, 140)


@pytest.mark.skipif(INTERPRETED, reason="the interpreter takes that code for a number, 480")
@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_the_code_that_is_no_number(code: int, device: str) -> None:
    """A damaged weight is seen, whatever x it meets; every other code is a number."""
    weight = torch.arange(256, dtype=torch.uint8).remainder(127).repeat(3, 1)
    weight[:, 128:] |= 128
    weight[1, 200] = code
    x, scale = torch.zeros(2, 256, device=device), torch.ones(1, 2, device=device)
    y = block_scaled_linear(x, weight.view(torch.float8_e4m3fn).to(device), scale)
    assert y.isnan().tolist() == [[False, True, False]] * 2


def test_the_reference_expands_a_part_of_the_weight_at_a_time(
    monkeypatch: pytest.MonkeyPatch, relative_error: Error
) -> None:
    """Sums of a part may be added in another order, which shows where large products cancel."""
    x, (weight, scale) = spread(4, 300, seed=5), quantize_blocks(spread(600, 300, seed=6), (128, 128))
    codes = quantize_rows(x, 128)
    whole = module.block_scaled_matmul_reference(*codes, weight, scale)
    monkeypatch.setattr(grouped_matmul_fp8, "_REFERENCE_ELEMENTS", 1)
    assert relative_error(module.block_scaled_matmul_reference(*codes, weight, scale), whole) < 1e-6
