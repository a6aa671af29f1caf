"""Products with few rows against float64, and the same bits for a row whatever rows are beside it, and how many."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dsa_engine.kernels.formats.fp8 import quantize_blocks
from dsa_engine.kernels.formats.int4 import arrange_int4_, planes_for, quantize_int4
from dsa_engine.kernels.formats.int8 import quantize_rows_int8
from dsa_engine.kernels.grouped.grouped_matmul import matmul_reference
from dsa_engine.kernels.grouped.grouped_matmul_int4 import W4A8, W4A16
from dsa_engine.kernels.grouped.grouped_matmul_int8 import INT8
from dsa_engine.kernels.grouped.products import ProductFormat
from dsa_engine.kernels.linear.block_scaled_matmul import block_scaled_linear
from dsa_engine.kernels.linear.linear import FEW_ROWS_ON_A_CPU, linear
from dsa_engine.kernels.linear.per_head_matmul import per_head_matmul
from dsa_engine.kernels.linear.quantized_linear import quantized_linear
from dsa_engine.kernels.runtime import cpu
from dsa_engine.kernels.runtime.launch import INTERPRETED

pytestmark = pytest.mark.usefixtures("on_a_cpu")

Error = Callable[[torch.Tensor, torch.Tensor], float]


def make(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("width, outputs", [(256, 40), (33, 7), (15, 1), (1, 3), (64, 101), (5, 0)])
@pytest.mark.parametrize("rows", [0, 1, 3, 8, FEW_ROWS_ON_A_CPU, FEW_ROWS_ON_A_CPU + 1])
def test_linear(
    rows: int, width: int, outputs: int, dtype: torch.dtype, bound: float, device: str, relative_error: Error
) -> None:
    x, weight = make(rows, width).to(device, dtype), make(outputs, width, seed=1).to(device, dtype)
    y = linear(x, weight)
    assert y.dtype == dtype
    assert relative_error(y, x.double() @ weight.double().t()) < (1e-6 if dtype == torch.float32 else bound)


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
    tokens: int, heads: int, inner: int, outer: int, transposed: bool, dtype: torch.dtype, bound: float, device: str,
    relative_error: Error,
) -> None:  # fmt: skip
    """Input and output are parts of rows; the matrix has contiguous rows or columns."""
    x = make(tokens, heads, inner + 5).to(device, dtype)[..., 3 : 3 + inner]
    weight = make(heads, 7 + outer, inner, seed=1).to(device, dtype)[:, 7:].transpose(1, 2)
    weight = weight if transposed else weight.contiguous()
    whole = torch.full((tokens, heads, outer + 2), 7.0, dtype=dtype, device=device)
    per_head_matmul(x, weight, whole[..., :outer])
    wanted = torch.einsum("thi,hio->tho", x.double(), weight.double())
    assert relative_error(whole[..., :outer], wanted) < (1e-6 if dtype == torch.float32 else bound)
    assert bool((whole[..., outer:] == 7).all())


def test_many_rows_are_float32_where_a_cpu_has_no_products_of_halves(
    monkeypatch: pytest.MonkeyPatch, relative_error: Error
) -> None:
    multiplied = []

    class Products(TorchDispatchMode):
        def __torch_dispatch__(self, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if call.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.bmm, torch.ops.aten.linear):
                multiplied.append(args[0].dtype)
            return call(*args, **(kwargs or {}))

    monkeypatch.setattr(cpu, "has_products", lambda dtype: False, raising=False)
    monkeypatch.setattr(cpu, "_EXPANDED_NUMBERS", 96 * 70, raising=False)  # 70 columns of b at a time
    x, weight = make(2, 20, 96).bfloat16(), make(200, 96, seed=1).bfloat16()
    heads = make(2, 72, 96, seed=2).bfloat16().transpose(1, 2)
    with Products(), torch.no_grad():
        plain, of_group = linear(x, weight), matmul_reference(x[0], weight, x.dtype)
        per_head_matmul(x.transpose(0, 1), heads, out := torch.empty(20, 2, 72, dtype=x.dtype))
    assert set(multiplied) == {torch.float32} and len(multiplied) == 3 + 3 + 2
    wanted = x.double() @ weight.double().t()
    assert relative_error(plain, wanted) < 4e-3 and relative_error(of_group, wanted[0]) < 4e-3
    assert relative_error(out, (x.double() @ heads.double()).transpose(0, 1)) < 4e-3


# Products of x with a weight as it is stored, made of a float32 matrix.
def _int4(product: ProductFormat, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    packed, scale = quantize_int4(weight, 32)
    arrange_int4_(packed, planes_for(product is W4A8))
    return quantized_linear(x, (packed, scale, None), product)


PRODUCTS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "plain": lambda x, weight: linear(x, weight.to(x.dtype)),
    "int8": lambda x, weight: quantized_linear(x, quantize_rows_int8(weight), INT8),
    "fp8": lambda x, weight: block_scaled_linear(x, *quantize_blocks(weight, (128, 128))),
    "w4a16": partial(_int4, W4A16),
    "w4a8": partial(_int4, W4A8),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_row_does_not_depend_on_the_others(name: str, dtype: torch.dtype) -> None:
    if not cpu.serves(torch.empty(0)):
        pytest.skip("PyTorch's products are its own")
    x, weight = make(FEW_ROWS_ON_A_CPU, 288).to(dtype), make(70, 288, seed=1)
    whole = PRODUCTS[name](x, weight)
    for first, last in ((0, 1), (0, 2), (3, 8), (9, 16)):
        assert torch.equal(PRODUCTS[name](x[first:last], weight), whole[first:last])


def test_a_row_of_heads_does_not_depend_on_the_others(dtype: torch.dtype) -> None:
    if not cpu.serves(torch.empty(0)):
        pytest.skip("PyTorch's products are its own")
    by_head = make(8, 4, 64).to(dtype)
    for matrices in (make(4, 64, 33, seed=2).to(dtype), make(4, 33, 64, seed=2).to(dtype).transpose(1, 2)):
        whole = torch.empty(8, 4, 33, dtype=dtype)
        per_head_matmul(by_head, matrices, whole)
        for first, last in ((0, 1), (0, 2), (3, 8)):
            part = torch.empty(last - first, 4, 33, dtype=dtype)
            per_head_matmul(by_head[first:last], matrices, part)
            assert torch.equal(part, whole[first:last])


@pytest.mark.parametrize("name", PRODUCTS)
def test_what_is_not_finite_shows(name: str, dtype: torch.dtype) -> None:
    """A row with NaN gives NaN, and no other row does."""
    if INTERPRETED and name in ("int8", "fp8", "w4a8"):
        pytest.skip("Triton's maxima leave NaN out, and its interpreter reads e4m3's as 480")
    x, weight = make(3, 64).to(dtype), make(5, 64, seed=1)
    x[1, 7] = torch.nan
    y = PRODUCTS[name](x, weight)
    assert bool(y[[0, 2]].isfinite().all()) and bool(y[1].isnan().all())


def test_sums_of_int8_are_exact() -> None:
    """A row of 127s by 127s and by −128s, of a width that leaves a rest: beyond what 16 bits, or a float, hold."""
    x, weight = torch.full((2, 3001), 127.0), torch.full((3, 3001), 127, dtype=torch.int8)
    weight[1], weight[2, ::2] = -128, -127
    x[1, ::3] = -126.0
    y = quantized_linear(x, (weight, torch.ones(3)), INT8)
    assert torch.equal(y, (x.double() @ weight.double().t()).float())
