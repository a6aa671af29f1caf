"""FP8 products of other libraries are used if their results are right, and get the layouts that they need."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from dsa_engine.kernels.formats.fp8 import quantize_blocks
from dsa_engine.kernels.formats.quantize import quantize_rows
from dsa_engine.kernels.grouped.grouped_matmul_fp8 import block_scaled_matmul_reference
from dsa_engine.kernels.linear import block_scaled_libraries as libraries
from dsa_engine.kernels.runtime import launch

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    libraries._tried_product.cache_clear()
    yield
    libraries._tried_product.cache_clear()


def right(*what: torch.Tensor) -> torch.Tensor:
    return block_scaled_matmul_reference(*what).bfloat16()


def broken(*what: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("no kernel for this chip\nand a long trace")


@pytest.mark.parametrize("product, used", [(right, True), (lambda *what: 1.05 * right(*what), False), (broken, False)])
def test_a_library_is_tried_first(product: Any, used: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(F, "scaled_mm", None, raising=False)  # there, whatever the version
    monkeypatch.setattr(libraries, "by_torch", product)
    assert libraries.library_product(CPU, False) is (product if used else None)
    monkeypatch.setattr(libraries, "by_torch", broken)
    assert libraries.library_product(CPU, False) is (product if used else None)  # asked once


@pytest.mark.parametrize("chip, powers_of_two, used", [(90, False, True), (100, False, False), (100, True, True)])
def test_deep_gemm_gets_no_scales_that_end_the_device(
    chip: int, powers_of_two: bool, used: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On sm_100 it packs scales as ue8m0, and traps at a mantissa: not even tried with other scales."""
    monkeypatch.setattr(libraries, "find_spec", lambda name: True)
    monkeypatch.setattr(libraries, "by_deep_gemm", right)
    monkeypatch.setattr(libraries, "by_torch", broken)
    with launch.compiling_for(chip):
        assert libraries.library_product(CPU, powers_of_two) is (right if used else None)


def test_powers_of_two() -> None:
    assert libraries.are_powers_of_two(2.0 ** torch.arange(-20, 20)) and libraries.are_powers_of_two(torch.zeros(1))
    assert not libraries.are_powers_of_two(torch.tensor([1.0, 1.5])) and not libraries.are_powers_of_two(-torch.ones(1))


@pytest.mark.parametrize("rows", [1, 2, 8, 71])
def test_pytorch_gets_the_layout_that_it_asks_for(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that 4 divides, the scales of x column by column, those of the weight row by row; both matrices with the
    inner dimension contiguous."""

    def scaled_mm(
        x: torch.Tensor, weight: torch.Tensor, x_scale: torch.Tensor, kind: Any, weight_scale: torch.Tensor,
        weight_kind: Any, output_dtype: torch.dtype,
    ) -> torch.Tensor:  # fmt: skip
        assert len(x) % 4 == 0 and x.is_contiguous() and weight.t().is_contiguous()
        assert x_scale.shape == (len(x), 8) and x_scale.stride() == (1, len(x))
        assert weight_scale.shape == (8, 2) and weight_scale.stride() == (1, 8)
        assert (kind, weight_kind) == (F.ScalingType.BlockWise1x128, F.ScalingType.BlockWise128x128)
        return block_scaled_matmul_reference(x, x_scale, weight.t(), weight_scale.t()).to(output_dtype)

    monkeypatch.setattr(F, "scaled_mm", scaled_mm)
    g = torch.Generator().manual_seed(0)
    codes, scales = quantize_rows(torch.randn(rows, 1024, generator=g))
    weight = quantize_blocks(torch.randn(256, 1024, generator=g), (128, 128))
    out = libraries.by_torch(codes, scales, *weight)
    torch.testing.assert_close(out, right(codes, scales, *weight))
