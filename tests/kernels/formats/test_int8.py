"""INT8: quantised rows, products and experts against the plainest float64 formulation of the same quantisation."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from dsa_engine.kernels.formats.int8 import quantize_rows_int8
from dsa_engine.kernels.grouped.grouped_matmul_int8 import INT8, grouped_matmul_int8, matmul_int8_reference
from dsa_engine.kernels.grouped.products import Groups
from dsa_engine.kernels.linear.quantized_linear import quantized_linear
from dsa_engine.kernels.moe.expert_mlp import expert_mlp
from dsa_engine.kernels.runtime.launch import runs_triton

pytestmark = pytest.mark.usefixtures("on_a_cpu")

Error = Callable[[torch.Tensor, torch.Tensor], float]


def naive_codes(x: torch.Tensor, largest: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales in float64; the division is that of float32, as the format says."""
    maximum = x.float().abs().amax(dim=-1) if largest is None else largest
    scale = maximum / 127
    codes = torch.where(scale[:, None] > 0, (x.float() / scale[:, None]).round(), 0).clamp(-127, 127)
    return codes.double(), scale.double()


def naive_product(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    codes, x_scale = naive_codes(x)
    return (codes @ weight.double().t()) * x_scale[:, None] * scale.double()


def int8_weight(*shape: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randint(-128, 128, shape, generator=g, dtype=torch.int8), torch.rand(shape[:-1], generator=g) / 100


@pytest.mark.parametrize("rows, width", [(0, 8), (1, 1), (5, 96), (3, 7168), (2, 20000)])
def test_rows(rows: int, width: int, dtype: torch.dtype, device: str) -> None:
    x = torch.randn(rows, width, generator=torch.Generator().manual_seed(0)).to(dtype)
    codes, scales = quantize_rows_int8(x.to(device))
    assert codes.dtype == torch.int8 and scales.dtype == torch.float32
    wanted, wanted_scales = naive_codes(x) if rows else (torch.empty(0, width), torch.empty(0))
    assert torch.equal(codes.cpu().double(), wanted.double())
    torch.testing.assert_close(scales.cpu().double(), wanted_scales.double(), rtol=1e-7, atol=0)


def test_rows_that_are_unusual(device: str) -> None:
    """Zeros, the smallest floats, ties, a strided view; and each row depends on itself alone."""
    x = torch.zeros(5, 16)
    x[1, 3], x[2, 0], x[3, :6] = 1e-42, -5e30, torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -1.5])
    x[4] = torch.randn(16)
    codes, scales = quantize_rows_int8(x.to(device))
    assert not codes[0].any() and codes[2, 0] == -127
    assert codes[3, :6].tolist() == [127, 0, 2, 2, 0, -2]  # ties to even
    assert bool((scales > 0).all()) and bool(scales.isfinite().all())
    alone, its_scale = quantize_rows_int8(x[4:].to(device))
    assert torch.equal(alone[0], codes[4]) and its_scale[0] == scales[4]
    strided = torch.randn(4, 32).to(device)
    assert torch.equal(quantize_rows_int8(strided[:, ::2])[0], quantize_rows_int8(strided[:, ::2].contiguous())[0])


@pytest.mark.parametrize("shape", [(1, 16, 32), (40, 17, 24), (70, 130, 300)])
def test_linear(
    shape: tuple[int, int, int], dtype: torch.dtype, bound: float, device: str, relative_error: Error
) -> None:
    rows, out, inner = shape
    x = torch.randn(rows, inner, generator=torch.Generator().manual_seed(1)).to(dtype)
    weight, scale = int8_weight(out, inner)
    stored = weight.to(device), scale.to(device)
    y = quantized_linear(x.to(device), stored, INT8)
    assert y.dtype == dtype and y.shape == (rows, out)
    assert relative_error(y, naive_product(x, weight, scale)) < bound
    again = quantized_linear(x[None].to(device), stored, INT8)
    assert torch.equal(again[0], y)
    assert torch.equal(quantized_linear(x[:1].to(device), stored, INT8)[0], y[0])


def test_a_linear_layer_of_no_rows(device: str) -> None:
    weight, scale = (t.to(device) for t in int8_weight(16, 32))
    assert quantized_linear(torch.empty(0, 32, device=device), (weight, scale), INT8).shape == (0, 16)


def test_the_reference_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = int8_weight(50, 32)[0], int8_weight(16, 32, seed=1)
    x_scale = torch.rand(50)
    whole = matmul_int8_reference(x, x_scale, *weight, torch.float32)
    monkeypatch.setattr("dsa_engine.kernels.grouped.grouped_matmul_int8._REFERENCE_ROWS", 7)
    assert torch.equal(matmul_int8_reference(x, x_scale, *weight, torch.float32), whole)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("expected", [None, 60.0, 1000.0])
def test_grouped(gated: bool, expected: float | None, device: str, relative_error: Error) -> None:
    """Every tile: rows gathered from a token list, groups without rows, rows that no expert serves."""
    if not runs_triton(torch.empty(0, device=device)):
        pytest.skip("the kernel runs on CUDA or in Triton's interpreter")
    counts = [5, 0, 21, 1]
    weight, scale = int8_weight(4, 32, 48)
    x = torch.randn(9, 48)
    codes, x_scale = quantize_rows_int8(x.to(device))
    source = torch.randint(9, (30,), dtype=torch.int32)
    row_ends = torch.tensor(counts).cumsum(0, dtype=torch.int32).to(device)
    groups = Groups(row_ends, source.to(device), gated, expected)
    out = grouped_matmul_int8(codes, x_scale, weight.to(device), scale.to(device), groups, torch.float32)
    group = [g for g, count in enumerate(counts) for _ in range(count)]
    wanted = torch.cat(
        [naive_product(x[[s]], weight[g], scale[g]) for s, g in zip(source.tolist(), group, strict=False)]
    )
    if gated:
        gate, up = wanted.chunk(2, dim=1)
        wanted = gate / (1 + (-gate).exp()) * up
    assert relative_error(out[: sum(counts)], wanted) < 1e-5


def experts_problem(tokens: int) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(3)
    experts = torch.randint(-1, 4, (tokens, 3), generator=g).int()
    return [torch.randn(tokens, 32, generator=g), experts, torch.rand(tokens, 3, generator=g)]


@pytest.mark.parametrize("uncounted_bytes", [0, 1 << 30])
def test_experts(uncounted_bytes: int, device: str, relative_error: Error) -> None:
    x, experts, weights = experts_problem(20)
    gate_up, down = int8_weight(4, 48, 32), int8_weight(4, 32, 24, seed=1)
    wanted = torch.zeros(20, 32, dtype=torch.float64)
    for t, row in enumerate(experts.tolist()):
        for j, e in enumerate(row):
            if e >= 0:
                gate, up = naive_product(x[[t]], gate_up[0][e], gate_up[1][e]).chunk(2, dim=1)
                hidden = gate / (1 + (-gate).exp()) * up
                wanted[t] += weights[t, j] * naive_product(hidden, down[0][e], down[1][e])[0]
    moved = [t.to(device) for t in (x, experts, weights)]
    stored = [tuple(t.to(device) for t in pair) for pair in (gate_up, down)]
    out = expert_mlp(*moved, *stored, INT8, uncounted_bytes=uncounted_bytes)  # type: ignore[arg-type]
    # A hidden value beside a tie may be rounded to the other code.
    assert relative_error(out, wanted) < 1e-3
    # A CPU multiplies few rows by its own kernel.
    some = expert_mlp(*(t[:10] for t in moved), *stored, INT8)  # type: ignore[arg-type]
    few = expert_mlp(*(t[:3] for t in moved), *stored, INT8)  # type: ignore[arg-type]
    assert torch.equal(few, some[:3]) and relative_error(some, wanted[:10]) < 1e-3
