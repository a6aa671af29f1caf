"""Bfloat16 as the interpreter of these tests computes it (``support/triton_interpreter.py``), against PyTorch's, bit
by bit; and the rows of its products."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from dsa_engine.kernels.runtime.launch import INTERPRETED

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="shows what the interpreter computes")

COUNT = 1 << 16


@pytest.fixture(autouse=True)
def no_warnings() -> Iterator[None]:
    """Numbers of all bits overflow, and NaNs are among them."""
    with np.errstate(all="ignore"):
        yield


def all_numbers(seed: int | None = None) -> torch.Tensor:
    """Every bfloat16 number, ``[65536]``, in the order of its bits or in a random one."""
    bits = torch.arange(COUNT) if seed is None else torch.randperm(COUNT, generator=torch.Generator().manual_seed(seed))
    return bits.to(torch.int32).to(torch.uint16).view(torch.bfloat16)


def check(got: torch.Tensor, wanted: torch.Tensor, atol: float = 0.0) -> None:
    torch.testing.assert_close(got, wanted, rtol=0, atol=atol, equal_nan=True)


@triton.jit
def binary_kernel(a, b, out, OPERATION: tl.constexpr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    x, y = tl.load(a + at), tl.load(b + at)
    if OPERATION == "add":
        z = x + y
    elif OPERATION == "subtract":
        z = x - y
    elif OPERATION == "multiply":
        z = x * y
    elif OPERATION == "divide":
        z = x / y
    elif OPERATION == "multiply and add":
        z = x * y + x
    elif OPERATION == "maximum":
        z = tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)
    elif OPERATION == "minimum":
        z = tl.minimum(x, y, propagate_nan=tl.PropagateNan.ALL)
    elif OPERATION == "where":
        z = tl.where(x < y, x, y)
    elif OPERATION == "times a constant":
        z = x * 0.1
    elif OPERATION == "absolute":
        z = tl.abs(x)
    else:
        z = -x
    # Triton promotes operands of a quotient, and of the larger and the smaller of two.
    promoted: tl.constexpr = OPERATION == "divide" or OPERATION == "maximum" or OPERATION == "minimum"
    tl.static_assert(z.dtype == (tl.float32 if promoted else tl.bfloat16))
    tl.store(out + at, z)


BINARY: dict[str, Callable[[Any, Any], torch.Tensor]] = {
    "add": torch.add,
    "subtract": torch.sub,
    "multiply": torch.mul,
    "divide": torch.div,
    "multiply and add": lambda x, y: x * y + x,
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "where": lambda x, y: torch.where(x < y, x, y),
    "times a constant": lambda x, _: x * torch.tensor(0.1).bfloat16(),
    "absolute": lambda x, _: x.abs(),
    "negative": lambda x, _: -x,
}


@pytest.mark.parametrize("operation", BINARY)
def test_arithmetic(operation: str) -> None:
    """Every number with another one. Products and sums are rounded one by one."""
    a, b = all_numbers(), all_numbers(1)
    out = torch.empty_like(a)
    binary_kernel[(1,)](a, b, out, OPERATION=operation, SIZE=COUNT)
    check(out, BINARY[operation](a, b))


@triton.jit
def cast_kernel(x, out, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(out + at, tl.load(x + at).to(out.dtype.element_ty))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16], ids=str)
def test_casts_to_other_types(dtype: torch.dtype) -> None:
    out = torch.empty(COUNT, dtype=dtype)
    cast_kernel[(1,)](all_numbers(), out, SIZE=COUNT)
    check(out, all_numbers().to(dtype))


@pytest.mark.parametrize("low", [0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF], ids=hex)
def test_float32_is_rounded_to_the_nearest_ties_to_even(low: int) -> None:
    """Every number, with what float32 has beyond it: nothing, half a step, little more and little less."""
    bits = (torch.arange(COUNT) << 16 | low) - (torch.arange(COUNT) >> 15 << 32)
    numbers, out = bits.to(torch.int32).view(torch.float32), torch.empty(COUNT, dtype=torch.bfloat16)
    cast_kernel[(1,)](numbers, out, SIZE=COUNT)
    check(out, numbers.bfloat16())


@triton.jit
def reduce_kernel(x, out, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tile = tl.load(x + at[:, None] * SIZE + at[None, :])
    tl.store(out + at, tl.sum(tile, axis=1))
    tl.store(out + SIZE + at, tl.max(tile, axis=0))
    tl.store(out + 2 * SIZE + at, tl.min(tl.trans(tile), axis=0))


def test_reductions() -> None:
    """A sum is rounded once, at its end. Integers are summed exactly, whatever their order."""
    x = torch.randint(-200, 200, (32, 32), generator=torch.Generator().manual_seed(0)).bfloat16()
    out = torch.empty(3, 32, dtype=torch.bfloat16)
    reduce_kernel[(1,)](x, out, SIZE=32)
    check(out, torch.stack((x.float().sum(1).bfloat16(), x.amax(0), x.amin(1))))


@triton.jit
def product_kernel(a, b, out, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    x, y = tl.load(a + at), tl.load(b + at)
    tl.store(out + at, tl.dot(x, y, acc=tl.full((SIZE, SIZE), 1.0, tl.float32)).to(out.dtype.element_ty))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_products_add_up_in_float32(dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(0)
    a, b = (torch.randint(-200, 200, (32, 32), generator=g).bfloat16() for _ in range(2))
    out = torch.empty(32, 32, dtype=dtype)
    product_kernel[(1,)](a, b, out, SIZE=32)
    check(out, (a.float() @ b.float() + 1).to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("size", [16, 32, 64])
def test_rows_of_a_product_do_not_depend_on_where_they_lie(size: int, dtype: torch.dtype) -> None:
    """The same rows in another order, and each between rows of zeros. BLAS fails this on processors without AVX-512, or
    with OPENBLAS_CORETYPE=Haswell."""
    g = torch.Generator().manual_seed(0)
    a, b = (torch.randn(size, size, generator=g).to(dtype) for _ in range(2))

    def product(rows: torch.Tensor) -> torch.Tensor:
        out = torch.empty(size, size)
        product_kernel[(1,)](rows, b, out, SIZE=size)
        return out

    wanted, order = product(a), torch.randperm(size, generator=g)
    check(wanted, (a.double() @ b.double() + 1).float(), atol=1e-4)
    check(product(a.view(torch.uint8).view(size, -1)[order].view(dtype)), wanted[order])
    for at in range(0, size, 5):
        alone = torch.zeros_like(a)
        alone[at] = a[3]
        check(product(alone)[at], wanted[3])
