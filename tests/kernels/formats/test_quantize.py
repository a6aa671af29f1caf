"""1×block quantisation, bit by bit: against the table of all e4m3 numbers."""

from __future__ import annotations

import math

import pytest
import torch

from caches import need_memory
from dsa_engine.kernels.formats.quantize import quantize_rows

# The numbers of the codes 0 … 126, in order; 127 is NaN.
E4M3 = [(code & 7) * 2.0**-9 if code < 8 else (8 + (code & 7)) * 2.0 ** ((code >> 3) - 10) for code in range(127)]


def nearest_codes(x: torch.Tensor) -> torch.Tensor:
    """Codes of the e4m3 numbers nearest to ``x``; of two that are as near, the even one."""
    table = torch.tensor(E4M3, dtype=torch.float64)
    size = x.double().abs()
    above = torch.bucketize(size, table).clamp(1, 126)
    down, up = size - table[above - 1], table[above] - size
    code = torch.where((up < down) | ((up == down) & (above % 2 == 0)), above, above - 1)
    return code.to(torch.uint8) | (torch.signbit(x).to(torch.uint8) << 7)


def naive(x: torch.Tensor, block: int, power_of_two: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales: amax, at least 1e-4, times 1/448 in float32; powers of two by Python's own arithmetic."""
    padded = torch.nn.functional.pad(x.float().cpu(), (0, -x.shape[-1] % block))
    blocks = padded.reshape(-1, block)
    scales = []
    for scale in (blocks.abs().amax(dim=1).clamp(min=1e-4) * torch.tensor(1 / 448)).tolist():
        scales.append(2.0 ** math.ceil(math.log2(scale)) if power_of_two else scale)
    scale = torch.tensor(scales, dtype=torch.float32)
    codes = nearest_codes((blocks / scale[:, None]).clamp(-448, 448))
    return codes.view(padded.shape)[..., : x.shape[-1]], scale.view(*x.shape[:-1], -1)


def check(x: torch.Tensor, block: int, power_of_two: bool) -> None:
    values, scales = quantize_rows(x, block, power_of_two)
    codes, wanted_scales = naive(x, block, power_of_two)
    assert values.dtype == torch.float8_e4m3fn and values.shape == x.shape and values.is_contiguous()
    assert torch.equal(scales.cpu(), wanted_scales)
    got = values.view(torch.uint8).cpu()
    for each in (got, codes):
        each[each == 0x80] = 0  # a fused quotient of -0 is 0
    assert torch.equal(got, codes)


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize(
    "shape, block",
    [
        ((1, 128), 128),
        ((5, 384), 128),
        ((2, 3, 256), 128),
        ((33, 24), 8),
        ((3, 7168), 128),
        ((7, 6), 2),
        ((9, 160), 128),
        ((5, 2, 7), 4),
        ((3, 2), 8),
    ],
)
def test_bit_by_bit(shape: tuple[int, ...], block: int, power_of_two: bool, dtype: torch.dtype, device: str) -> None:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=g) * (2 * torch.randn(shape, generator=g)).exp()
    check(x.to(device, dtype), block, power_of_two)


@pytest.mark.parametrize("power_of_two", [False, True])
def test_every_number_and_every_tie(power_of_two: bool, device: str) -> None:
    """All numbers of e4m3, the middles between two, and their neighbours in float32, beside 448."""
    table = torch.tensor(E4M3)
    ties = (table[1:] + table[:-1]) / 2
    numbers = torch.cat((table, ties, torch.nextafter(ties, ties + 1), torch.nextafter(ties, ties - 1)))
    numbers = torch.cat((numbers, -numbers))
    x = torch.full((len(numbers), 2), 448.0)
    x[:, 0] = numbers
    check(x.to(device), 2, power_of_two)
    values, scales = quantize_rows(x[: len(table)].to(device), 2, power_of_two)
    assert bool((scales == 1).all()) and torch.equal(values[:, 0].float().cpu(), table)


@pytest.mark.parametrize("power_of_two", [False, True])
def test_zeros_and_the_ends_of_float32(power_of_two: bool, device: str) -> None:
    x = torch.zeros(5, 4)
    x[1], x[2], x[3], x[4] = 1e-44, -3e38, 2.0**-120, 448 * 2.0**-126
    x[2, 1:] = torch.tensor([1e30, 0.0, 3.4e38])
    check(x.to(device), 4, power_of_two)


def test_a_block_of_small_numbers_is_scaled_as_if_it_held_one_of_1e_minus_4(device: str) -> None:
    x = torch.tensor([[1e-4, 0.0], [1e-7, -3e-6], [0.0, 0.0]], device=device)
    scales = quantize_rows(x, 2)[1].flatten().tolist()
    assert scales == [scales[0]] * 3 and abs(scales[0] * 448 / 1e-4 - 1) < 1e-6
    assert quantize_rows(x, 2, power_of_two=True)[1].flatten().tolist() == [2.0**-22] * 3


def test_powers_of_two_are_those_of_a_division(device: str) -> None:
    """float32 rounds 1/448 up; beside every power of two, multiplication by it gives the same scale."""
    near = 448 * 2.0 ** torch.arange(-20, 21, dtype=torch.float64)
    steps = torch.arange(-40, 41, dtype=torch.int32)
    largest = (near.float().view(torch.int32)[:, None] + steps).view(torch.float32).flatten()
    scales = quantize_rows(largest[:, None].repeat(1, 2).to(device), 2, power_of_two=True)[1].flatten().cpu()
    wanted = 2.0 ** (largest.double() / 448).float().double().log2().ceil()
    assert torch.equal(scales.double(), wanted)


def test_scales_are_rounded_up_to_powers_of_two(device: str) -> None:
    x = torch.tensor([[448.0, 1.0], [448.1, 1.0], [447.9, 1.0], [896.0, 1.0]], device=device)
    assert quantize_rows(x, 2, power_of_two=True)[1].flatten().tolist() == [1.0, 2.0, 1.0, 2.0]


def test_the_largest_value_meets_the_end_of_the_range(device: str) -> None:
    values, scales = quantize_rows(torch.tensor([[1.0, -3.5, 0.0, 2.0]], device=device), 2)
    assert values.float().tolist() == [[128.0, -448.0, 0.0, 448.0]]
    torch.testing.assert_close(scales.cpu(), torch.tensor([[3.5 / 448, 2.0 / 448]]))


def test_a_view_of_wider_rows(device: str) -> None:
    wide = torch.randn(9, 96, generator=torch.Generator().manual_seed(0)).to(device)
    check(wide[:, 16:80], 32, True)


@pytest.mark.parametrize("shape", [(0, 128), (3, 0, 128), (4, 0)])
def test_nothing(shape: tuple[int, ...], device: str) -> None:
    values, scales = quantize_rows(torch.empty(shape, device=device))
    assert values.shape == shape and scales.shape == (*shape[:-1], shape[-1] // 128)


def test_offsets_beyond_two_to_the_31(device: str) -> None:
    far = 2**31 + 64
    need_memory(device, 5 * far)
    huge = torch.empty(far + 64, dtype=torch.float16, device=device)
    x = huge.as_strided((2, 16), (far, 1))
    x.copy_(torch.randn(2, 16, generator=torch.Generator().manual_seed(0)))
    check(x, 8, False)


@pytest.mark.parametrize("shape, block", [((5, 300), 128), ((70, 256), 128), ((0, 8), 4)])
def test_given_memory(shape: tuple[int, int], block: int, dtype: torch.dtype, device: str) -> None:
    """The same codes and scales, side by side in wider rows, of which nothing else is written."""
    g = torch.Generator().manual_seed(0)
    x, (count, width) = torch.randn(shape, generator=g).to(dtype).to(device), shape
    wanted = quantize_rows(x, block)
    codes = torch.zeros(count, width + 16, dtype=torch.uint8, device=device)
    scales = torch.zeros(count, wanted[1].shape[1] + 3, device=device)
    into = codes.view(torch.float8_e4m3fn)[:, 8:-8], scales[:, 1:-2]
    for got, same, new in zip(quantize_rows(x, block, codes=into[0], scales=into[1]), into, wanted, strict=True):
        assert got.data_ptr() == same.data_ptr() and torch.equal(got.float(), new.float())
    edges = codes[:, :8], codes[:, -8:], scales[:, :1], scales[:, -2:]
    assert not any(edge.any() for edge in edges)
    with pytest.raises(ValueError, match="do not fit"):
        quantize_rows(x, block, codes=into[0][:, 1:], scales=into[1])
