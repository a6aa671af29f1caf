"""The variants of `scripts/kernel_bench/variants/products.py`: arithmetic, and the order of instructions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton.language as tl

from dsa_engine.kernels.formats.fp8 import quantize_blocks
from dsa_engine.kernels.linear.block_scaled_matmul import block_scaled_linear, no_program_finished
from dsa_engine.kernels.runtime import launch
from dsa_engine.kernels.runtime.launch import INTERPRETED
from kernel_bench.compile_only import compile_only
from kernel_cases import CASES
from kernel_cases.inputs import Inputs, Sizes
from variants import products
from variants.products import per_head_fp8, prefetch_rows, product_ahead

Error = Callable[[torch.Tensor, torch.Tensor], float]


runs = pytest.mark.skipif(
    not (INTERPRETED or torch.cuda.is_available()), reason="the kernels run on CUDA or in Triton's interpreter"
)


@pytest.mark.skipif(INTERPRETED, reason="the references are meant")
def test_cases_and_what_they_are_compared_with_run() -> None:
    cases = list(CASES["variant_products"](Inputs(torch.device("cpu"), torch.bfloat16), Sizes.small()))
    for case in cases:
        for run in (case.run, *case.baselines.values()):
            run()
    assert len(cases) == 8 and all(case.baselines and case.needs == 90 for case in cases)


@runs
@pytest.mark.parametrize(("rows", "out", "inner"), [(1, 256, 1536), (4, 200, 384)])
def test_a_product_ahead_has_the_bits_of_the_engines(
    rows: int, out: int, inner: int, dtype: torch.dtype, device: str
) -> None:
    """Also of sums in parts, by whose counts the next product goes."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(rows, inner + 16, generator=g).to(device, dtype)[:, :inner]
    weight, scale = (t.to(device) for t in quantize_blocks(torch.randn(out, inner, generator=g), (128, 128)))
    finished = no_program_finished(x)
    wanted = block_scaled_linear(x, weight, scale)
    assert torch.equal(product_ahead(x, weight, scale, finished), wanted) and not finished.any()


@runs
@pytest.mark.parametrize(("inner", "outer"), [(128, 512), (512, 128)])
def test_a_matrix_for_each_head_in_fp8(
    inner: int, outer: int, dtype: torch.dtype, bound: float, device: str, relative_error: Error
) -> None:
    """W_UK and W_UV as they lie in a checkpoint, and rows apart; each block has a scale of another size."""
    g, heads = torch.Generator().manual_seed(0), 3
    x = torch.randn(4, heads + 1, inner + 8, generator=g).to(device, dtype)[:, 1:, :inner]
    codes = torch.randn(heads, 128, 512, generator=g).to(torch.float8_e4m3fn).to(device)
    scales = (
        torch.tensor([0.25, 1.0, 3.0, 7.0], device=device) * torch.arange(1, heads + 1, device=device)[:, None, None]
    )
    weight, scale = (codes, scales) if inner == 128 else (codes.mT, scales.mT)
    out, by_reference = (torch.empty(4, heads, outer, dtype=dtype, device=device) for _ in range(2))
    per_head_fp8(x, weight, scale, out)
    whole = weight.double() * scale.double().repeat_interleave(128, 1).repeat_interleave(128, 2)
    assert relative_error(out, torch.einsum("thi,hio->tho", x.double(), whole)) < bound
    with launch.references():
        per_head_fp8(x, weight, scale, by_reference)
    assert relative_error(by_reference, out) < bound


@pytest.fixture
def asked_for(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Addresses and sizes, of a kernel in the interpreter that asks as on a GPU."""
    given: list[tuple[int, int]] = []

    def ask(address: Any, size: Any) -> None:
        size = size if isinstance(size, int) else int(size.handle.data[0])
        given.extend((int(at), size) for at in address.handle.data)

    monkeypatch.setattr(products, "_ask", ask)
    monkeypatch.setattr(products, "INTERPRETED", False)
    for name in ("gdc_wait", "gdc_launch_dependents"):
        monkeypatch.setattr(tl.extra.cuda, name, lambda: None)
    return given


@pytest.mark.skipif(not INTERPRETED, reason="a GPU does not say what it was asked for")
def test_what_is_asked_for(asked_for: list[tuple[int, int]]) -> None:
    """Each byte of the weight, whose sums have two parts, or of a part of each row: once."""
    x, scale, weight = torch.zeros(1, 1280), torch.ones(2, 10), torch.zeros(256, 1280, dtype=torch.uint8)
    codes, finished = weight.view(torch.float8_e4m3fn), no_program_finished(x)
    for ask, columns in (
        (lambda: product_ahead(x, codes, scale, finished), range(1280)),
        (lambda: prefetch_rows(codes[:, :512]), range(512)),
        (lambda: prefetch_rows(codes.view(torch.bfloat16)[:, 64:128]), range(128, 256)),
    ):
        ask()
        counts = torch.zeros(weight.numel(), dtype=torch.int32)
        for address, size in asked_for:
            counts[address - weight.data_ptr() :][:size] += 1
        wanted = torch.zeros_like(weight, dtype=torch.int32)
        wanted[:, list(columns)] = 1
        assert torch.equal(counts.view_as(wanted), wanted) and all(at % 16 == size % 16 == 0 for at, size in asked_for)
        asked_for.clear()


@pytest.mark.skipif(INTERPRETED, reason="nothing can be compiled under TRITON_INTERPRET=1")
def test_compiled_weights_are_asked_for_before_the_wait() -> None:
    """And nothing is loaded, stored or counted: all that follows may depend on the launch before. The next launch may
    come at once."""
    x, weight = torch.empty(1, 2048, dtype=torch.bfloat16), torch.empty(7168, 2048, dtype=torch.float8_e4m3fn)
    with compile_only(90) as launched:
        product_ahead(x, weight, torch.empty(56, 16), no_program_finished(x))
        prefetch_rows(weight)
    product, prefetch = launched
    assert product.metadata.launch_pdl and not prefetch.metadata.launch_pdl
    before, wait, after = product.asm["ptx"].partition("griddepcontrol.wait")
    assert wait and before.index("griddepcontrol.launch_dependents") < before.index("cp.async.bulk.prefetch.L2")
    for access in ("ld.global", "st.global", "cp.async.cg", "atom."):
        assert access not in before and access in after and access not in prefetch.asm["ptx"], access
    assert "cp.async.bulk.prefetch.L2" in prefetch.asm["ptx"]
