"""The Hadamard transform against its matrix, built by doubling."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from caches import hadamard_matrix
from dsa_engine.kernels.formats.hadamard import check_size, hadamard_reference

Error = Callable[[torch.Tensor, torch.Tensor], float]


@pytest.mark.parametrize("size", [1, 2, 8, 16, 64, 128])
def test_sizes(size: int, dtype: torch.dtype, bound: float, device: str, relative_error: Error) -> None:
    x = torch.randn(5, size, generator=torch.Generator().manual_seed(0)).to(dtype)
    y = hadamard_reference(x.to(device), size**-0.5)
    assert y.dtype == dtype
    assert relative_error(y, x.double() @ hadamard_matrix(size) * size**-0.5) < bound


@pytest.mark.parametrize("shape", [(0, 128), (3, 70, 128), (2, 0, 16)])
def test_shapes(shape: tuple[int, ...], device: str) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    y = hadamard_reference(x.to(device), 0.5)
    torch.testing.assert_close(y.double().cpu(), x.double() @ hadamard_matrix(shape[-1]) * 0.5, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("size", [0, 3, 96, 256])
def test_bad_sizes(size: int) -> None:
    with pytest.raises(ValueError, match=f"needs a power of two, at most 128, not {size}"):
        check_size(size)
