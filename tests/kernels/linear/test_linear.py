"""Products with few rows against float64, and the same bits for a row whatever rows are beside it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from dsa_engine.kernels.linear.linear import FEW_ROWS_ON_A_CPU, linear
from dsa_engine.kernels.linear.per_head_matmul import per_head_matmul
from dsa_engine.kernels.runtime import cpu

pytestmark = pytest.mark.usefixtures("on_a_cpu")

Error = Callable[[torch.Tensor, torch.Tensor], float]


def make(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("width, outputs", [(256, 40), (33, 7), (15, 1), (1, 3), (64, 101), (5, 0)])
@pytest.mark.parametrize("rows", [0, 1, 3, 8, FEW_ROWS_ON_A_CPU, FEW_ROWS_ON_A_CPU + 1])
def test_linear(rows: int, width: int, outputs: int, device: str, relative_error: Error) -> None:
    x, weight = make(rows, width).to(device), make(outputs, width, seed=1).to(device)
    y = linear(x, weight)
    assert y.dtype == torch.float32 and relative_error(y, x.double() @ weight.double().t()) < 1e-6


def test_linear_of_any_strides_and_shapes(device: str, dtype: torch.dtype, bound: float, relative_error: Error) -> None:
    weight = make(6, 20, seed=1).to(device, dtype)
    wide = make(5, 2, 50).to(device, dtype)
    for x in (wide[0], wide[:, 1], wide.transpose(0, 2)[:20].movedim(0, -1), wide[..., ::2]):
        x = x[..., :20]
        assert relative_error(linear(x, weight), x.double() @ weight.double().t()) < bound
    x = make(3, 6).to(device, dtype)
    assert relative_error(linear(x, weight.t()), x.double() @ weight.double()) < bound


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    "tokens, heads, inner, outer", [(8, 3, 32, 64), (1, 1, 1, 1), (5, 2, 17, 40), (70, 2, 8, 9), (0, 2, 3, 4)]
)
def test_per_head_matmul(
    tokens: int, heads: int, inner: int, outer: int, transposed: bool, device: str, relative_error: Error
) -> None:
    """Input and output are parts of rows; the matrix has contiguous rows or columns."""
    x = make(tokens, heads, inner + 5).to(device)[..., 3 : 3 + inner]
    weight = make(heads, 7 + outer, inner, seed=1).to(device)[:, 7:].transpose(1, 2)
    weight = weight if transposed else weight.contiguous()
    whole = torch.full((tokens, heads, outer + 2), 7.0, device=device)
    per_head_matmul(x, weight, whole[..., :outer])
    wanted = torch.einsum("thi,hio->tho", x.double(), weight.double())
    assert relative_error(whole[..., :outer], wanted) < 1e-6
    assert bool((whole[..., outer:] == 7).all())


def test_a_row_does_not_depend_on_the_others() -> None:
    if not cpu.serves(torch.empty(0)):
        pytest.skip("PyTorch's products are its own")
    x, weight = make(FEW_ROWS_ON_A_CPU, 256), make(70, 256, seed=1)
    whole = linear(x, weight)
    for first, last in ((0, 1), (0, 2), (3, 8), (9, 16)):
        assert torch.equal(linear(x[first:last], weight), whole[first:last])
    by_head = x[:8].view(8, 4, 64)
    for matrices in (make(4, 64, 33, seed=2), make(4, 33, 64, seed=2).transpose(1, 2)):
        whole = torch.empty(8, 4, 33)
        per_head_matmul(by_head, matrices, whole)
        for first, last in ((0, 1), (0, 2), (3, 8)):
            part = torch.empty(last - first, 4, 33)
            per_head_matmul(by_head[first:last], matrices, part)
            assert torch.equal(part, whole[first:last])
