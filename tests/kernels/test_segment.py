"""Segments: their arithmetic and their check."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dsa_engine.kernels.segment import Segment, check_segments


@given(st.integers(0, 50), st.integers(1, 50))
def test_pairs_are_those_under_the_causal_mask(start: int, length: int) -> None:
    segment = Segment(0, length, 0, start)
    assert segment.visible_pairs == sum(position + 1 for position in range(start, start + length))
    assert segment.end == start + length


def test_check() -> None:
    tables = torch.zeros(2, 3, dtype=torch.int32)
    check_segments([Segment(0, 4, 1, 8), Segment(4, 1, 0, 0)], 5, tables, 4)
    for bad in (
        Segment(2, 4, 0, 0),
        Segment(-1, 2, 0, 0),
        Segment(0, 0, 0, 0),
        Segment(0, 1, 2, 0),
        Segment(0, 1, -1, 0),
        Segment(0, 1, 0, 12),
    ):
        with pytest.raises(ValueError, match=r"Segment\(row="):
            check_segments([bad], 5, tables, 4)
