"""Peak rates: no kernel is faster, whatever else the node does."""

from __future__ import annotations

import time

import pytest
import torch

from dsa_engine.kernels.linear.linear import linear
from dsa_engine.kernels.runtime import cpu
from dsa_engine.measure import ceilings
from dsa_engine.measure.ceilings import Ceilings

CPU = torch.device("cpu")


def test_no_product_is_faster_than_the_ceiling() -> None:
    """Ours beat the library's, so the library's is none."""
    if cpu.library() is None:
        pytest.skip("no compiler")
    measured = Ceilings(1.0, 1.0, 1.0).raised(CPU)
    x, weight = torch.ones(32, 512), torch.ones(2048, 512)
    fastest = 0.0
    for run in [lambda: linear(x, weight), lambda: x @ weight.t()] * 10:
        begin = time.perf_counter()
        run()
        fastest = max(fastest, 2 * x.shape[0] * weight.numel() / (time.perf_counter() - begin))
    assert measured.matmul_flops_per_s == 1.0 < fastest <= measured.flops_per_s
    written = measured.to_json()
    assert written["peak_tflops_per_s"] == measured.flops_per_s / 1e12 > written["matmul_tflops_per_s"] == 1e-12


def test_multiply_adds_are_counted() -> None:
    if cpu.library() is None:
        pytest.skip("no compiler")
    values = torch.ones(16)
    steps, twice = (cpu.kernels().dsa_multiply_adds(values.data_ptr(), n) for n in (100, 200))
    assert twice == 2 * steps and steps % 200 == 0 and values.isfinite().all()


def test_the_peak_is_the_higher_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for made, expected in ((5e12, 5e12), (3e12, 5e12), (7e12, 7e12)):
        monkeypatch.setattr(ceilings, "multiply_adds_per_s", lambda made=made: made)
        assert Ceilings(5e12, 1.0, 2e12).raised(CPU) == Ceilings(expected, 1.0, 2e12)
    monkeypatch.undo()
    monkeypatch.setattr(cpu, "library", lambda: None)
    assert Ceilings(5e12, 1.0).raised(CPU) == Ceilings(5e12, 1.0), "no compiler: the product"
