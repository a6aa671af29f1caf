"""Products of groups of rows against a product for each row in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from dsa_engine.kernels.grouped import grouped_matmul as module
from dsa_engine.kernels.grouped.grouped_matmul import (
    PLAIN,
    grouped_matmul_triton,
    takes_torch_grouped_mm,
)
from dsa_engine.kernels.grouped.products import Groups, max_tiles
from dsa_engine.kernels.runtime.launch import INTERPRETED, runs_triton
from fake_cuda import FakeDevice

Error = Callable[[torch.Tensor, torch.Tensor], float]


def needs_kernel(device: str) -> None:
    if not runs_triton(torch.empty(0, device=device)):
        pytest.skip("the kernel runs on CUDA or in Triton's interpreter")


def naive(x: torch.Tensor, weight: torch.Tensor, counts: list[int], gated: bool = False) -> torch.Tensor:
    group = [g for g, count in enumerate(counts) for _ in range(count)]
    products = torch.stack([weight[g].double() @ row for g, row in zip(group, x.double(), strict=True)])
    if not gated:
        return products
    gate, up = products.chunk(2, dim=-1)
    return gate / (1 + (-gate).exp()) * up


def ends_of(counts: list[int], device: str) -> torch.Tensor:
    return torch.tensor(counts).cumsum(0, dtype=torch.int32).to(device)


@pytest.mark.parametrize("counts", [[3, 0, 5, 1, 0], [0, 0, 0, 0, 0], [0, 0, 0, 0, 9], [1, 1, 1, 1, 1]])
def test_reference(counts: list[int], dtype: torch.dtype, bound: float, device: str, relative_error: Error) -> None:
    g = torch.Generator().manual_seed(0)
    x, weight = torch.randn(sum(counts), 8, generator=g).to(dtype), torch.randn(5, 16, 8, generator=g).to(dtype)
    out = PLAIN.multiply_reference(x.to(device), (weight.to(device),), counts, dtype)
    assert out.dtype == dtype and out.shape == (sum(counts), 16)
    if sum(counts):
        assert relative_error(out, naive(x, weight, counts)) < bound


# Rows of a group, expected for the choice of tiles: below, at and over the tiles of each size.
@pytest.mark.parametrize(
    "counts, expected",
    [([0, 15, 16, 17], 4), ([0, 70, 3], 150), ([5, 130, 0], 10_000), ([1], 1)],
    ids=["few", "some", "many", "one"],
)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("width, inner", [(40, 128), (14, 56), (14, 50)])
def test_kernel(
    counts: list[int],
    expected: float,
    gated: bool,
    width: int,
    inner: int,
    dtype: torch.dtype,
    bound: float,
    device: str,
    relative_error: Error,
) -> None:
    needs_kernel(device)
    g = torch.Generator().manual_seed(width)
    rows, tokens = sum(counts), 11
    x = torch.randn(tokens, inner, generator=g).to(dtype)
    weight = torch.randn(len(counts), (2 if gated else 1) * width, inner, generator=g).to(dtype) / inner**0.5
    source = torch.randint(0, tokens, (rows,), generator=g, dtype=torch.int32)
    # Four rows beyond the served ones: their source may be anything.
    longer = torch.cat((source, torch.full((4,), 1 << 30, dtype=torch.int32)))
    there, row_ends = weight.to(device), ends_of(counts, device)
    groups = Groups(row_ends, longer.to(device), gated, expected)
    out = grouped_matmul_triton(x.to(device), there, groups)
    assert out.dtype == dtype and out.shape == (rows + 4, width)
    assert relative_error(out[:rows], naive(x[source], weight, counts, gated)) < bound
    groups = Groups(row_ends, None, gated, expected)
    gathered = grouped_matmul_triton(x[source].to(device), there, groups)
    assert torch.equal(out[:rows], gathered)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("hidden", [7168, 6144], ids=["DeepSeek-V3.2", "GLM-5"])
def test_released_widths(hidden: int, rows: int, device: str, relative_error: Error) -> None:
    """The released inner dimensions with few columns: gate and up of 2 experts, then down."""
    needs_kernel(device)
    g = torch.Generator().manual_seed(hidden)
    counts = [rows, 1]
    x = torch.randn(rows + 1, hidden, generator=g).half().to(device)
    gate_up = (torch.randn(2, 2 * 40, hidden, generator=g) / hidden**0.5).half().to(device)
    down = (torch.randn(2, 33, 2048, generator=g) / 2048**0.5).half().to(device)
    out = grouped_matmul_triton(x, gate_up, Groups(ends_of(counts, device), gated=True))
    assert relative_error(out, naive(x, gate_up, counts, gated=True)) < 2e-3
    y = torch.randn(rows + 1, 2048, generator=g).half().to(device)
    out = grouped_matmul_triton(y, down, Groups(ends_of(counts, device)))
    assert relative_error(out, naive(y, down, counts)) < 2e-3


@pytest.mark.parametrize("served", [0, 5])
def test_rows_beyond_the_last_end_are_left_alone(served: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    needs_kernel(device)
    monkeypatch.setattr(module.torch, "empty", lambda *size, **kwargs: torch.full(size, 7.0, **kwargs))
    x, weight = torch.ones(40, 16, device=device), torch.ones(3, 8, 16, device=device)
    row_ends = torch.tensor([served, served, served], dtype=torch.int32, device=device)
    out = grouped_matmul_triton(x, weight, Groups(row_ends))
    assert bool((out[:served] == 16).all()) and bool((out[served:] == 7).all())


def test_a_strided_view(device: str) -> None:
    needs_kernel(device)
    wide, weight = torch.randn(6, 40, device=device), torch.randn(2, 8, 24, device=device)
    row_ends = ends_of([2, 4], device)
    for x in (wide[:, 8:32], wide.t()[:24].t()[:, :24]):
        torch.testing.assert_close(
            grouped_matmul_triton(x, weight, Groups(row_ends)), naive(x, weight, [2, 4]).float(), rtol=1e-4, atol=1e-4
        )


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.skipif(not INTERPRETED, reason="9 GiB that only the interpreter leaves untouched")
def test_offsets_beyond_2_to_the_31_elements(gated: bool) -> None:
    """The last of many matrices, as in 256 experts of DeepSeek-V3.2, and a token far down."""
    groups, inner, far = 20_000, 7168, 300_000
    weight = torch.empty(groups, 16, inner, dtype=torch.float16)
    x = torch.empty(far + 1, inner, dtype=torch.float16)
    assert weight[:-1].numel() > 1 << 31 and x[:-1].numel() > 1 << 31
    weight[-1] = torch.randn(16, inner) / inner**0.5
    x[far] = torch.randn(inner)
    row_ends = torch.zeros(groups, dtype=torch.int32)
    row_ends[-1] = 1
    out = grouped_matmul_triton(x, weight, Groups(row_ends, torch.tensor([far], dtype=torch.int32), gated))
    torch.testing.assert_close(out.double(), naive(x[far:], weight[-1:], [1], gated), rtol=1e-2, atol=2e-3)


@pytest.mark.parametrize("counts", [[0, 0, 0], [1, 1, 1], [16, 16, 16], [17, 0, 31], [1, 40, 2], [0, 0, 43]])
def test_tiles_are_enough(counts: list[int]) -> None:
    for size in (16, 64):
        assert sum(-(-count // size) for count in counts) <= max_tiles(sum(counts), len(counts), size)


def test_bad_arguments() -> None:
    x, weight = torch.ones(4, 12), torch.ones(5, 6, 12)
    row_ends = torch.full((5,), 4, dtype=torch.int32)
    with pytest.raises(ValueError, match="do not fit"):
        grouped_matmul_triton(x, weight[:, :, :5], Groups(row_ends))
    with pytest.raises(ValueError, match="x is torch.float32, the weight torch.float16"):
        grouped_matmul_triton(x, weight.half(), Groups(row_ends))
    with pytest.raises(ValueError, match="int32, not torch.int64"):
        grouped_matmul_triton(x, weight, Groups(row_ends.long()))
    with pytest.raises(ValueError, match="source must be int32, not torch.int32 and torch.int64"):
        grouped_matmul_triton(x, weight, Groups(row_ends, torch.zeros(4, dtype=torch.int64)))
    with pytest.raises(ValueError, match=r"two halves of the weight, which is \(5, 5, 12\)"):
        grouped_matmul_triton(x, weight[:, :5], Groups(row_ends, gated=True))


@pytest.mark.skipif(torch.cuda.is_available() or INTERPRETED, reason="there is a GPU, or the interpreter's turn")
@pytest.mark.parametrize("chip, has_it", [(80, False), (89, False), (90, True), (100, True), (103, True), (120, False)])
def test_torch_is_asked_where_it_does_not_wait(chip: int, has_it: bool) -> None:
    """On other chips its grouped product copies to the host, also in a capture."""
    with FakeDevice(capability=chip):
        x, weight = (torch.empty(shape, device="cuda", dtype=torch.bfloat16) for shape in ((2, 8), (1, 16, 8)))
        assert takes_torch_grouped_mm(x, weight) == has_it


def test_when_torch_is_asked() -> None:
    """Never on a CPU; on a GPU in bfloat16 where rows of matrices begin at 16 bytes."""
    assert not takes_torch_grouped_mm(torch.ones(2, 8).bfloat16(), torch.ones(1, 8, 8).bfloat16())
    if torch.cuda.is_available() and hasattr(F, "grouped_mm"):
        x = torch.ones(2, 8, device="cuda", dtype=torch.bfloat16)
        assert takes_torch_grouped_mm(x, torch.ones(1, 16, 8))
        assert not takes_torch_grouped_mm(x, torch.ones(1, 12, 8)) and not takes_torch_grouped_mm(
            x.half(), torch.ones(1, 16, 8)
        )
