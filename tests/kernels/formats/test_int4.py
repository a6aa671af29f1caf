"""Packed INT4: the layout, the rounding, products and experts against the plainest float64 formulation."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from compile_only import compile_only
from dsa_engine.kernels.formats import int4
from dsa_engine.kernels.formats.int4 import (
    arrange_int4_,
    dequantize_int4,
    pack_int4,
    planes_for,
    quantize_int4,
    unpack_int4,
)
from dsa_engine.kernels.formats.int8 import quantize_rows_int8
from dsa_engine.kernels.grouped.grouped_matmul_int4 import W4A8, W4A16, grouped_matmul_int4
from dsa_engine.kernels.grouped.products import Groups
from dsa_engine.kernels.linear.quantized_linear import quantized_linear
from dsa_engine.kernels.moe.expert_mlp import expert_mlp
from dsa_engine.kernels.runtime.launch import INTERPRETED, runs_triton

pytestmark = pytest.mark.usefixtures("on_a_cpu")

Error = Callable[[torch.Tensor, torch.Tensor], float]
Packed = tuple[torch.Tensor, torch.Tensor]


def int4_weight(*shape: int, group: int = 32, seed: int = 0) -> Packed:
    """Random packed codes, and scales in bfloat16."""
    g = torch.Generator().manual_seed(seed)
    *rows, columns = shape
    packed = torch.randint(-(2**31), 2**31 - 1, (*rows, columns // 8), generator=g, dtype=torch.int32)
    return packed, (torch.rand(*rows, columns // group, generator=g) / 10 + 0.01).bfloat16()


def arranged(weight: Packed, int8_activations: bool) -> Packed:
    """A copy with its columns as products want them."""
    packed = weight[0].clone()
    arrange_int4_(packed, planes_for(int8_activations))
    return packed, weight[1]


def naive_weight(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """float64 ``[out, in]``, code by code from the words."""
    codes = torch.stack([(packed.long() >> 4 * i) % 16 - 8 for i in range(8)], dim=-1).flatten(-2)
    return codes.double() * scale.double().repeat_interleave(codes.shape[-1] // scale.shape[-1], dim=-1)


def random_orders(matrices: int, orders: int, columns: int) -> torch.Tensor:
    """int32 ``[matrices, orders, columns]``, a permutation each."""
    g = torch.Generator().manual_seed(7)
    each = [torch.randperm(columns, generator=g, dtype=torch.int32) for _ in range(matrices * orders)]
    return torch.stack(each).view(matrices, orders, columns)


def in_order_of_x(weight: torch.Tensor, orders: torch.Tensor) -> torch.Tensor:
    """``weight [matrices, out, in]`` whose column j multiplies column ``orders[…, j]`` of x, as a usual one."""
    each = orders.long().repeat_interleave(weight.shape[1] // orders.shape[1], dim=1)
    return torch.zeros_like(weight).scatter_(2, each, weight)


def naive_rows(x: torch.Tensor, int8_activations: bool) -> torch.Tensor:
    """The factors of the product, in float64."""
    if not int8_activations:
        return x.double()
    scale = x.float().abs().amax(dim=-1, keepdim=True) / 127
    return (x.float() / scale).round().double() * scale.double()


def test_the_layout() -> None:
    codes = torch.arange(-8, 8, dtype=torch.int8).repeat(3, 1)
    packed = pack_int4(codes)
    assert packed.dtype == torch.int32 and packed.shape == (3, 2)
    assert packed[0].tolist() == [0x76543210, 0xFEDCBA98 - (1 << 32)]
    assert torch.equal(unpack_int4(packed), codes)
    with pytest.raises(ValueError, match="rows of 12 columns cannot be packed in eights"):
        pack_int4(torch.zeros(2, 12, dtype=torch.int8))


@pytest.mark.parametrize("planes", [2, 4])
def test_planes(planes: int) -> None:
    """Nibble p of unit u of 32 columns is column 32 / planes · p + u."""
    stored = int4_weight(3, 2, 96)[0]
    codes, packed = unpack_int4(stored), stored.clone()
    arrange_int4_(packed, planes)
    assert torch.equal(unpack_int4(packed, planes), codes) and torch.equal(pack_int4(codes, planes), packed)
    part = packed[1, 1, 4:8].tolist()  # columns 32 to 63
    bits = sum((word % (1 << 32)) << 32 * i for i, word in enumerate(part))
    for unit in range(32 // planes):
        for plane in range(planes):
            nibble = bits >> 4 * (planes * unit + plane) & 15
            assert nibble - 8 == codes[1, 1, 32 + 32 // planes * plane + unit]


def test_nothing_is_arranged_on_no_device() -> None:
    """The sizes of a released model are counted at once, for any number of words."""

    class Refusing(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            raise AssertionError(f"{func} ran")

    packed = torch.empty(256, 4096, 896, dtype=torch.int32, device="meta")
    with Refusing():
        arrange_int4_(packed, 4)


def ptx(code: str, word: int) -> list[int]:
    """The outputs of the instructions ``code`` for a word of 32 bits."""
    values: dict[str, int] = {}
    *_, outputs = (i for i in range(5) if f"${i}" in code)
    for line in (line.strip() for line in code.strip("{}").split(";")):
        if not line or line.startswith(".reg"):
            continue
        name, *rest = line.replace(",", "").split()
        into, *operands = rest
        numbers = [word if o == f"${outputs}" else values[o] if o in values else int(o, 0) for o in operands]
        if name == "lop3.b32":
            a, b, c, table = numbers
            bits = ((a >> i & 1) << 2 | (b >> i & 1) << 1 | c >> i & 1 for i in range(32))
            values[into] = sum((table >> index & 1) << i for i, index in enumerate(bits))
        else:
            shift = {"shl.b32": lambda a, b: a << b, "shr.b32": lambda a, b: a >> b}[name]
            values[into] = shift(*numbers) & 0xFFFFFFFF
    return [values[f"${i}"] for i in range(outputs)]


@pytest.mark.parametrize("dtype, planes", [(torch.int8, 2), (torch.bfloat16, 4), (torch.float16, 4)])
def test_instructions_on_words(dtype: torch.dtype, planes: int) -> None:
    """The inline assembly, which the interpreter cannot run, gives the same as its plain form: operand words, each
    a plane of consecutive columns."""
    code, above, factor = {
        torch.int8: (int4._TO_INT8, 0, 16),
        torch.bfloat16: (int4._ABOVE_128, 136, 1),
        torch.float16: (int4._ABOVE_1024, 1032, 1),
    }[dtype]
    stored = int4_weight(8, 32, seed=5)[0]
    packed = stored.clone()
    arrange_int4_(packed, planes)
    words = [ptx(code.value, word % (1 << 32)) for word in packed.flatten().tolist()]
    operands = torch.tensor(words).to(torch.uint32).view(torch.int32).view(8, 4, planes)  # row, word, plane
    numbers = operands.transpose(1, 2).contiguous().view(dtype).flatten(1) - above
    assert torch.equal(numbers.double(), factor * unpack_int4(stored).double())


@pytest.mark.skipif(INTERPRETED, reason="nothing can be compiled under TRITON_INTERPRET=1")
@pytest.mark.parametrize("int8_activations", [False, True])
def test_unpacking_takes_no_shuffles(int8_activations: bool) -> None:
    """The planes are where Hopper's products want them: of 64 × 128 weights a thread has 8 words, and each takes as
    many instructions as are written, with no second way through shared memory."""
    rows = torch.empty(64, 512, dtype=torch.int8 if int8_activations else torch.bfloat16)
    weight, scale = torch.empty(4, 64, 64, dtype=torch.int32), torch.empty(4, 64, 4, dtype=torch.bfloat16)
    x_scale = torch.empty(64) if int8_activations else None
    groups = Groups(torch.empty(4, dtype=torch.int32))
    with compile_only(90) as launched:
        grouped_matmul_int4(rows, x_scale, weight, scale, None, groups, torch.bfloat16)
    (kernel,) = launched
    masks = "0xF0F0F0F0" if int8_activations else "0x000F000F"
    assert len(re.findall(rf"lop3.*{masks}", kernel.asm["ptx"])) == 8 * planes_for(int8_activations)
    assert kernel.asm["ttgir"].count("ttg.local_store") == 0


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("scale_dtype", [torch.bfloat16, torch.float32])
def test_quantised_weights(group: int, scale_dtype: torch.dtype) -> None:
    weight = torch.randn(300, 256, generator=torch.Generator().manual_seed(0))
    weight[5], weight[6, :group] = 0, 1e-3
    packed, scale = quantize_int4(weight, group, scale_dtype)
    assert scale.dtype == scale_dtype and scale.shape == (300, 256 // group)
    got = dequantize_int4(packed, scale, torch.float32)
    assert torch.equal(got.double(), naive_weight(packed, scale).float().double())
    assert not got[5].any()
    # Nearest codes, and scales that are better than those that just reach the largest value.
    each = scale.float().repeat_interleave(group, dim=1)
    assert torch.equal(unpack_int4(packed).float(), (weight / each).round().clamp(-8, 7))
    plain = weight.abs().unflatten(1, (-1, group)).amax(-1).div(7.5).repeat_interleave(group, dim=1).clamp_min(1e-30)
    plain_error = ((weight / plain).round().clamp(-8, 7) * plain - weight).norm()
    assert float((got - weight).norm()) < 0.99 * float(plain_error) < 0.15 * float(weight.norm())


@pytest.mark.parametrize(
    "shape, group, error",
    [
        ((4, 96), 128, "rows of 96 columns cannot be cut into groups of 128"),
        ((4, 96), 48, "groups of 48 are not supported; supported are 32, 64, 128"),
    ],
)
def test_groups_that_do_not_fit(shape: tuple[int, int], group: int, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        quantize_int4(torch.randn(shape), group)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite(value: float) -> None:
    weight = torch.randn(4, 64)
    weight[2, 7] = value
    with pytest.raises(ValueError, match="NaN or infinity, which INT4 cannot represent"):
        quantize_int4(weight, 32)


@pytest.mark.parametrize("int8_activations", [False, True])
@pytest.mark.parametrize("shape", [(1, 16, 32), (40, 70, 96)])
def test_linear(
    shape: tuple[int, int, int],
    int8_activations: bool,
    dtype: torch.dtype,
    bound: float,
    device: str,
    relative_error: Error,
) -> None:
    rows, out, inner = shape
    x = torch.randn(rows, inner, generator=torch.Generator().manual_seed(1)).to(dtype)
    stored = int4_weight(out, inner)
    packed, scale = arranged(stored, int8_activations)
    product, stored_there = W4A8 if int8_activations else W4A16, (packed.to(device), scale.to(device))
    y = quantized_linear(x.to(device), (*stored_there, None), product)
    assert y.dtype == dtype
    assert relative_error(y, naive_rows(x, int8_activations) @ naive_weight(*stored).t()) < bound
    again = quantized_linear(x[None].to(device), (*stored_there, None), product)
    torch.testing.assert_close(again[0], y)
    # The columns of x in another order, which is given.
    columns = torch.randperm(inner, generator=torch.Generator().manual_seed(2), dtype=torch.int32)
    moved = torch.empty_like(x).index_copy_(1, columns.long(), x).to(device)
    ordered = quantized_linear(moved, (*stored_there, columns.to(device)), product)
    assert torch.equal(ordered, y)


@pytest.mark.parametrize("int8_activations", [False, True])
@pytest.mark.parametrize(
    "gated, expected, group, orders",
    [
        *((gated, *tiles, 0) for gated in (False, True) for tiles in ((None, 32), (60.0, 64), (1000.0, 128))),
        *((False, None, 32, 1), (True, 60.0, 64, 1), (True, None, 32, 2)),
    ],
)
def test_grouped(
    gated: bool,
    orders: int,
    int8_activations: bool,
    expected: float | None,
    group: int,
    device: str,
    relative_error: Error,
) -> None:
    if not runs_triton(torch.empty(0, device=device)):
        pytest.skip("the kernel runs on CUDA or in Triton's interpreter")
    counts = [5, 0, 21, 1]
    stored = int4_weight(4, 32, 128, group=group)
    packed, scale = arranged(stored, int8_activations)
    x = torch.randn(9, 128)
    source = torch.randint(9, (30,), dtype=torch.int32)
    row_ends = torch.tensor(counts).cumsum(0, dtype=torch.int32).to(device)
    rows = quantize_rows_int8(x.to(device)) if int8_activations else (x.to(device), None)
    columns = random_orders(4, orders, 128).to(device) if orders else None
    groups = Groups(row_ends, source.to(device), gated, expected)
    out = grouped_matmul_int4(*rows, packed.to(device), scale.to(device), columns, groups, torch.float32)
    number = [g for g, count in enumerate(counts) for _ in range(count)]
    weight = in_order_of_x(naive_weight(*stored), random_orders(4, orders, 128)) if orders else naive_weight(*stored)
    multiplied = naive_rows(x, int8_activations)
    wanted = torch.stack([weight[g] @ multiplied[s] for s, g in zip(source.tolist(), number, strict=False)])
    if gated:
        gate, up = wanted.chunk(2, dim=1)
        wanted = gate / (1 + (-gate).exp()) * up
    assert relative_error(out[: sum(counts)], wanted) < 1e-5


@pytest.mark.parametrize("orders", [0, 2])
@pytest.mark.parametrize("int8_activations", [False, True])
def test_experts(int8_activations: bool, orders: int, device: str, relative_error: Error) -> None:
    g = torch.Generator().manual_seed(3)
    experts = torch.randint(-1, 4, (20, 3), generator=g).int()
    x, weights = torch.randn(20, 64, generator=g), torch.rand(20, 3, generator=g)
    gate_up, down = int4_weight(4, 64, 64), int4_weight(4, 64, 32, seed=1)
    first, second = naive_weight(*gate_up), naive_weight(*down)
    columns: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)
    if orders:
        of_gate_up, of_down = random_orders(4, orders, 64), random_orders(4, 1, 32)
        first, second = in_order_of_x(first, of_gate_up), in_order_of_x(second, of_down)
        columns = of_gate_up.squeeze(1).to(device), of_down[:, 0].to(device)
    wanted = torch.zeros(20, 64, dtype=torch.float64)
    for t, row in enumerate(experts.tolist()):
        for j, e in enumerate(row):
            if e >= 0:
                gate, up = (naive_rows(x[[t]], int8_activations) @ first[e].t()).chunk(2, dim=1)
                hidden = gate / (1 + (-gate).exp()) * up
                wanted[t] += weights[t, j] * (naive_rows(hidden, int8_activations) @ second[e].t())[0]
    moved = [t.to(device) for t in (x, experts, weights)]
    stored = [
        (*(t.to(device) for t in arranged(pair, int8_activations)), order)
        for pair, order in zip((gate_up, down), columns, strict=True)
    ]
    for uncounted_bytes in (0, 1 << 30):
        out = expert_mlp(*moved, *stored, W4A8 if int8_activations else W4A16, uncounted_bytes=uncounted_bytes)
        assert relative_error(out, wanted) < (1e-3 if int8_activations else 1e-5)  # a code beside a tie
