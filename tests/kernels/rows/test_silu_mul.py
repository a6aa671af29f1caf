"""The SwiGLU gate against its equation in float64."""

from __future__ import annotations

import pytest
import torch

from dsa_engine.kernels.formats.quantize import quantize_tokens
from dsa_engine.kernels.rows.silu_mul import silu_mul
from dsa_engine.kernels.runtime.launch import INTERPRETED

pytestmark = pytest.mark.usefixtures("on_a_cpu")

ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 2**-7, torch.float16: 2**-9}


def naive(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.double().chunk(2, dim=-1)
    return gate / (1 + (-gate).exp()) * up


@pytest.mark.parametrize("shape", [(1, 2), (5, 14), (0, 6), (2, 3, 8), (3, 4096), (1, 2 * 1536), (0, 0)])
def test_gate(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    x = (torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 4).to(device, dtype)
    y = silu_mul(x)
    assert y.shape == (*shape[:-1], shape[-1] // 2) and y.dtype == dtype
    torch.testing.assert_close(y.double(), naive(x), rtol=2 * ROUNDING[dtype], atol=ROUNDING[dtype])


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("width", [2048, 900, 12])
def test_codes_of_the_result(width: int, power_of_two: bool, dtype: torch.dtype, device: str) -> None:
    """Bit for bit those of a quantisation afterwards."""
    x = (torch.randn(5, 2 * width, generator=torch.Generator().manual_seed(0)) * 4).to(device, dtype)
    wanted = silu_mul(x)
    words = torch.zeros_like(quantize_tokens(wanted, power_of_two))
    assert torch.equal(silu_mul(x, words, power_of_two), wanted)
    assert torch.equal(words, quantize_tokens(wanted, power_of_two))


def test_far_from_zero(device: str) -> None:
    """exp(−gate) overflows where the gate is closed: the result is 0, not NaN."""
    x = torch.tensor([[-200.0, -90.0, 200.0, 3.0, 3.0, 3.0]], device=device)
    torch.testing.assert_close(silu_mul(x), torch.tensor([[0.0, 0.0, 600.0]], device=device))
    low = torch.tensor([[-1e38, float("-inf"), -3e37, -1e38, 1.0, -1e38]], device=device)
    wanted = torch.tensor([[0.0, float("nan"), 0.0]], device=device)
    torch.testing.assert_close(silu_mul(low), wanted, equal_nan=True)


def test_a_strided_view_is_left_as_it_was(device: str) -> None:
    wide = torch.randn(5, 40, generator=torch.Generator().manual_seed(0)).to(device)
    before = wide.clone()
    for x in (wide[:, 4:32], wide[:, ::2], wide.t()[:6].t()):
        torch.testing.assert_close(silu_mul(x).double(), naive(x), rtol=1e-6, atol=1e-6)
    assert torch.equal(wide, before)


@pytest.mark.skipif(not INTERPRETED, reason="8 GiB that only the interpreter leaves untouched")
def test_rows_beyond_2_to_the_31_elements() -> None:
    """Two rows, the second more than 2³¹ elements after the first."""
    pool = torch.empty(2**31 + 64, dtype=torch.float16)
    x = pool.as_strided((2, 8), (2**31 + 16, 1))
    x[:] = torch.arange(16.0).view(2, 8)
    torch.testing.assert_close(silu_mul(x).double(), naive(x), rtol=2e-3, atol=1e-3)
