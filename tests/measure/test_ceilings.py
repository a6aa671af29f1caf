"""Peak rates: what they count, and which one is the ceiling."""

from __future__ import annotations

import pytest
import torch

from dsa_engine.kernels.runtime import cpu
from dsa_engine.measure import ceilings
from dsa_engine.measure.ceilings import Ceilings

CPU = torch.device("cpu")


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
    written = Ceilings(5e12, 1e9, 2e12).to_json()
    assert written == {"peak_tflops_per_s": 5.0, "matmul_tflops_per_s": 2.0, "copy_gb_per_s": 1.0}
    monkeypatch.undo()
    monkeypatch.setattr(cpu, "library", lambda: None)
    assert Ceilings(5e12, 1.0).raised(CPU) == Ceilings(5e12, 1.0), "no compiler: the product"
