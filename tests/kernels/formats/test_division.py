"""Division by the remainder: the kernel's own lines on numpy arrays, with multiply-adds that round once."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from dsa_engine.kernels.formats import division


def fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """A product of two float32 is exact in float64."""
    return (a.astype(np.float64) * b.astype(np.float64) + c.astype(np.float64)).astype(np.float32)


def test_quotients_are_those_of_a_division(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(division, "tl", SimpleNamespace(fma=fma, div_rn=lambda a, b: (a / b).astype(np.float32)))
    monkeypatch.setattr(division, "_FUSES", True)
    generator = np.random.default_rng(0)
    bits = generator.integers(0, 1 << 23, (2, 1 << 20), dtype=np.int32)
    # Mantissas of all kinds: random ones, whole numbers as codes are, and those just above and below a power of two.
    bits[:, : 1 << 18] &= -1 << 16
    bits[1, -1 << 17 :] = generator.integers(-4, 4, 1 << 17, dtype=np.int32) & 0x7FFFFF
    a, b = (bits | 0x3F800000).view(np.float32)
    for exponent in (-99, -13, 0, 5, 100):
        a_scaled = np.ldexp(a, exponent)
        np.testing.assert_array_equal(division.divide.fn(a_scaled, b), a_scaled / b)
    zeros = np.zeros(1, np.float32)
    np.testing.assert_array_equal(division.divide.fn(zeros, b[:1]), zeros)
    with np.testing.assert_raises(AssertionError):  # a product with the reciprocal alone would not do
        np.testing.assert_array_equal(a * (1 / b), a / b)
