"""The SwiGLU gate against its equation in float64."""

from __future__ import annotations

import pytest
import torch

from dsa_engine.kernels.silu_mul import silu_mul


@pytest.mark.parametrize("dtype, bound", [(torch.float32, 1e-6), (torch.bfloat16, 2**-7), (torch.float16, 2**-9)])
@pytest.mark.parametrize("shape", [(1, 2), (5, 14), (0, 6), (2, 3, 8)])
def test_gate(shape: tuple[int, ...], dtype: torch.dtype, bound: float) -> None:
    x = (torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 4).to(dtype)
    width = shape[-1] // 2
    gate, up = x[..., :width].double(), x[..., width:].double()
    y = silu_mul(x)
    assert y.shape == (*shape[:-1], width) and y.dtype == dtype
    torch.testing.assert_close(y.double(), gate / (1 + (-gate).exp()) * up, rtol=2 * bound, atol=bound)


def test_odd_width() -> None:
    with pytest.raises(ValueError, match="even width, not 7"):
        silu_mul(torch.ones(2, 7))
