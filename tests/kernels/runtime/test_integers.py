"""Whole numbers for launches: the same as Triton's."""

from __future__ import annotations

import triton

from dsa_engine.kernels.runtime.integers import cdiv, next_power_of_2


def test_as_triton() -> None:
    numbers = [*range(70), 4095, 4096, 4097, 2**31 - 1, 2**31, 2**31 + 1]
    assert [next_power_of_2(n) for n in numbers] == [triton.next_power_of_2(n) for n in numbers]
    for n in numbers:
        assert [cdiv(n, by) for by in (1, 3, 64)] == [triton.cdiv(n, by) for by in (1, 3, 64)]
