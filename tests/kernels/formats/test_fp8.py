"""FP8 blocks: the definition against a loop over blocks, rounding error, parts of a matrix, bad arguments."""

from __future__ import annotations

import pytest
import torch

from caches import need_memory
from dsa_engine.kernels.formats.fp8 import E4M3_MAX, dequantize_blocks, quantize_blocks, scale_shape

SHAPES = [(128, 128), (256, 384), (300, 200), (1, 1), (127, 129), (5, 1000)]


def dequantize_by_loop(weight: torch.Tensor, scale_inv: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    out = torch.empty(weight.shape)
    for i in range(0, weight.shape[0], block[0]):
        for j in range(0, weight.shape[1], block[1]):
            part = weight[i : i + block[0], j : j + block[1]].float()
            out[i : i + block[0], j : j + block[1]] = part * scale_inv[i // block[0], j // block[1]]
    return out


@pytest.mark.parametrize(
    "shape, block",
    [
        *((shape, (128, 128)) for shape in SHAPES),
        *(((300, 200), (16, 32)), ((127, 129), (16, 32)), ((5, 1000), (1, 128)), ((40, 129), (1, 128))),
    ],
)
def test_round_trip(shape: tuple[int, int], block: tuple[int, int], device: str) -> None:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 3
    weight, scale_inv = quantize_blocks(values, block)
    assert weight.dtype == torch.float8_e4m3fn and weight.shape == values.shape
    assert scale_inv.dtype == torch.float32 and scale_inv.shape == scale_shape(shape, block)
    again = dequantize_blocks(weight.to(device), scale_inv.to(device), block).cpu()
    assert torch.equal(again, dequantize_by_loop(weight, scale_inv, block))
    # Three bits of mantissa: half a step is 1/16 of a normal number, and 2^-10 of the scale of a subnormal one.
    steps = scale_inv.repeat_interleave(block[0], 0)[: shape[0]].repeat_interleave(block[1], 1)[:, : shape[1]]
    assert ((again - values).abs() <= values.abs() / 16 + steps * 2**-9).all()
    # The largest magnitude of every block reaches the end of the range.
    assert again.abs().max() == pytest.approx(values.abs().max().item(), rel=1e-5)


@pytest.mark.parametrize("shape, block", [((300, 200), (128, 128)), ((300, 200), (200, 96)), ((20, 21), (3, 5))])
def test_other_dtypes_are_rounded_once(
    shape: tuple[int, int], block: tuple[int, int], dtype: torch.dtype, device: str
) -> None:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 3
    weight, scale_inv = quantize_blocks(values, block)
    got = dequantize_blocks(weight.to(device), scale_inv.to(device), block, dtype=dtype)
    assert got.dtype == dtype and torch.equal(got.cpu(), dequantize_by_loop(weight, scale_inv, block).to(dtype))


def test_every_e4m3_number(device: str) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)[None]
    scale = torch.full((1, 2), 2.0)
    got = dequantize_blocks(codes.to(device), scale.to(device), (128, 128)).cpu()
    torch.testing.assert_close(got, codes.float() * 2, rtol=0, atol=0, equal_nan=True)
    assert int(got.isnan().sum()) == 2


def test_offsets_beyond_two_to_the_31(device: str) -> None:
    """Two rows 2^31 elements apart in a buffer of which no more is touched."""
    far = 2**31 + 64
    need_memory(device, 1.1 * far)
    values, scale_inv = quantize_blocks(torch.randn(2, 64), (128, 128))
    buffer = torch.empty(far + 64, dtype=torch.uint8, device=device).as_strided((2, 64), (far, 1))
    buffer.copy_(values.view(torch.uint8))
    got = dequantize_blocks(buffer.view(torch.float8_e4m3fn), scale_inv.to(device), (128, 128))
    assert torch.equal(got.cpu(), dequantize_by_loop(values, scale_inv, (128, 128)))


@pytest.mark.parametrize("shape", [(0, 5), (5, 0)])
def test_an_empty_matrix(shape: tuple[int, int], device: str) -> None:
    scale_inv = torch.empty(scale_shape(shape, (2, 2)), device=device)
    weight = torch.empty(shape, dtype=torch.float8_e4m3fn, device=device)
    assert dequantize_blocks(weight, scale_inv, (2, 2), dtype=torch.float16).shape == shape


def test_power_of_two_scales_are_rounded_up() -> None:
    values = torch.randn(256, 300, generator=torch.Generator().manual_seed(1))
    _, exact = quantize_blocks(values, (128, 128))
    weight, scale_inv = quantize_blocks(values, (128, 128), power_of_two=True)
    assert torch.equal(scale_inv.log2(), scale_inv.log2().round())
    assert (scale_inv >= exact).all() and (scale_inv < 2 * exact).all()
    assert (dequantize_blocks(weight, scale_inv, (128, 128)) - values).abs().max() < 0.2
    # A scale that is already a power of two does not change.
    _, exact_scale = quantize_blocks(torch.full((2, 2), E4M3_MAX / 4), (2, 2), power_of_two=True)
    assert exact_scale.item() == 0.25


def test_zeros_and_tiny_values_stay_finite() -> None:
    values = torch.zeros(4, 8)
    values[2:] = 1e-44
    weight, scale_inv = quantize_blocks(values, (2, 8))
    assert torch.equal(dequantize_blocks(weight, scale_inv, (2, 8))[:2], torch.zeros(2, 8))
    assert torch.isfinite(dequantize_blocks(weight, scale_inv, (2, 8))).all() and (scale_inv > 0).all()


@pytest.mark.parametrize(
    "start, size", [((0, 0), (300, 200)), ((5, 7), (20, 20)), ((127, 1), (2, 128)), ((128, 0), (172, 200))]
)
def test_a_part_equals_the_same_part_of_the_whole(start: tuple[int, int], size: tuple[int, int], device: str) -> None:
    block = (128, 64)
    weight, scale_inv = quantize_blocks(torch.randn(300, 200, device=device), block)
    (start_row, start_column), (rows, columns) = start, size
    down, across = scale_shape(size, block, start)
    scales = scale_inv[start_row // block[0] :, start_column // block[1] :][:down, :across]
    cut = slice(start_row, start_row + rows), slice(start_column, start_column + columns)
    part = dequantize_blocks(weight[cut], scales, block, start)
    whole = dequantize_blocks(weight, scale_inv, block)
    assert torch.equal(part, whole[cut])


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="must be a matrix"):
        quantize_blocks(torch.randn(4), (2, 2))
    with pytest.raises(ValueError, match="block_size"):
        quantize_blocks(torch.randn(4, 4), (0, 2))
    with pytest.raises(TypeError, match="floating-point"):
        quantize_blocks(torch.ones(4, 4, dtype=torch.int32), (2, 2))
    with pytest.raises(ValueError, match="NaN or infinity"):
        quantize_blocks(torch.tensor([[1.0, float("inf")]]), (2, 2))
    with pytest.raises(ValueError, match="NaN or infinity"):
        quantize_blocks(torch.tensor([[1.0, float("nan")]]), (2, 2))
