"""RMSNorm against its equation in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from dsa_engine.kernels.formats.quantize import quantize_tokens
from dsa_engine.kernels.rows.add_rms_norm import add_rms_norm
from dsa_engine.kernels.rows.rms_norm import rms_norm
from dsa_engine.kernels.runtime.operation import Comparison, compared

pytestmark = pytest.mark.usefixtures("on_a_cpu")

Error = Callable[[torch.Tensor, torch.Tensor], float]


def naive(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.double()
    return weight.double() * x / ((x * x).sum(-1, keepdim=True) / x.shape[-1] + eps).sqrt()


@pytest.mark.parametrize("eps", [1e-6, 1e-5, 0.1])
@pytest.mark.parametrize("shape", [(1, 1), (5, 96), (0, 8), (2, 3, 7), (4, 1000)])
def test_norm(shape: tuple[int, ...], eps: float, device: str) -> None:
    g = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(shape, generator=g) * 3).to(device), torch.randn(shape[-1], generator=g).to(device)
    y = rms_norm(x, weight, eps)
    assert y.shape == shape and y.dtype == torch.float32
    torch.testing.assert_close(y.double(), naive(x, weight, eps), rtol=1e-5, atol=1e-6)


def test_a_row_of_zeros_stays_zero(device: str) -> None:
    assert not rms_norm(torch.zeros(2, 8, device=device), torch.ones(8, device=device), 1e-6).any()


def test_statistics_are_float32(dtype: torch.dtype, bound: float, device: str, relative_error: Error) -> None:
    """A sum of squares of 1,000 numbers near 200 overflows float16, and keeps 8 bits in bfloat16."""
    g = torch.Generator().manual_seed(0)
    x = (200 * torch.randn(6, 1000, generator=g)).to(device, dtype)
    weight = torch.randn(1000, generator=g).to(device, dtype)
    y = rms_norm(x, weight, 1e-6)
    assert y.dtype == dtype
    assert relative_error(y, naive(x, weight, 1e-6)) < bound


def test_a_strided_view(device: str) -> None:
    """The latent is normed as the first columns of a wider row."""
    wide = torch.randn(9, 40, generator=torch.Generator().manual_seed(0)).to(device)
    weight = torch.ones(32, device=device)
    assert torch.equal(rms_norm(wide[:, :32], weight, 1e-6), rms_norm(wide[:, :32].contiguous(), weight, 1e-6))


def test_with_the_residual(device: str) -> None:
    g = torch.Generator().manual_seed(0)
    x, residual, weight = (torch.randn(n, generator=g).to(device) for n in ((7, 12), (7, 12), (12,)))
    before = residual.clone()
    normed, summed = add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(summed, x + residual) and torch.equal(residual, before)
    torch.testing.assert_close(
        normed.double(), naive(x.double() + residual.double(), weight, 1e-5), rtol=1e-4, atol=1e-6
    )


def test_with_two_summands(dtype: torch.dtype, device: str) -> None:
    """The result has the same bits as if they had been added before."""
    g = torch.Generator().manual_seed(0)
    x, also, residual, weight = (torch.randn(n, generator=g).to(dtype).to(device) for n in ((7, 12),) * 3 + ((12,),))
    for one, other in zip(
        add_rms_norm(x, residual, weight, 1e-5, also), add_rms_norm(x + also, residual, weight, 1e-5), strict=True
    ):
        assert torch.equal(one, other)


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("width", [1536, 900, 12])
def test_codes_of_what_is_normed(width: int, power_of_two: bool, dtype: torch.dtype, device: str) -> None:
    """Codes and scales are those of a quantisation afterwards, bit for bit, and the numbers those without it."""
    g = torch.Generator().manual_seed(0)
    x, also, residual = ((3 * torch.randn(5, width, generator=g)).to(device, dtype) for _ in range(3))
    weight = torch.randn(width, generator=g).to(device, dtype)
    runs: list[Callable[..., tuple[torch.Tensor, ...]]] = [
        lambda *words: (rms_norm(x, weight, 1e-6, *words),),
        lambda *words: add_rms_norm(x, residual, weight, 1e-6, also, *words),
    ]
    for run in runs:
        wanted = run()
        words = torch.zeros_like(quantize_tokens(wanted[0], power_of_two))
        made = run(words, power_of_two)
        assert torch.equal(words, quantize_tokens(made[0], power_of_two))
        assert width < 128 or all(map(torch.equal, made, wanted))  # a block at least, else sums may have another order
        with compared(Comparison()) as seen:
            run(words.zero_(), power_of_two)
        assert not seen.wrong
