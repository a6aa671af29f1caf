"""Segments: their arithmetic and their check."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dsa_engine.kernels.rows.segment import CuSeqlens, Segment, Segments


@given(st.integers(0, 50), st.integers(1, 50))
def test_pairs_are_those_under_the_causal_mask(start: int, length: int) -> None:
    segment = Segment(0, length, 0, start)
    assert segment.visible_pairs == sum(position + 1 for position in range(start, start + length))
    assert segment.end == start + length


SEGMENTS = [Segment(0, 4, 1, 8), Segment(4, 1, 0, 0), Segment(5, 3, 0, 7)]


def test_rows_on_the_device(device: str) -> None:
    segments = Segments.of(SEGMENTS, device)
    assert (segments.rows, segments.longest, len(segments), list(segments)) == (8, 12, 3, SEGMENTS)
    assert segments.sequences.device.type == segments.visible.device.type == device
    assert segments.sequences.dtype == segments.visible.dtype == torch.int32
    assert segments.sequences.tolist() == [1, 1, 1, 1, 0, 0, 0, 0]
    assert segments.visible.tolist() == [9, 10, 11, 12, 1, 8, 9, 10]


def test_nothing() -> None:
    segments = Segments.of([])
    assert (segments.rows, segments.longest, list(segments)) == (0, 0, []) and segments.tiles(4).shape == (0, 2)
    segments.check(0, torch.zeros(0, 0, dtype=torch.int32), 4)


@pytest.mark.parametrize("first, last", [(0, 8), (0, 0), (2, 6), (4, 5), (6, 8), (1, 2)])
def test_a_part_is_numbered_from_0(first: int, last: int) -> None:
    whole = Segments.of(SEGMENTS)
    part = whole.part(first, last)
    assert whole.part(first, last) is part
    again = Segments.of(part.segments)  # which checks that the rows follow one another
    assert part.rows == last - first
    assert torch.equal(part.visible, whole.visible[first:last]) and torch.equal(part.visible, again.visible)
    assert torch.equal(part.sequences, whole.sequences[first:last]) and torch.equal(part.sequences, again.sequences)


@given(st.lists(st.integers(1, 9), max_size=6), st.integers(1, 5))
def test_tiles_cover_every_row_once_and_cross_no_segment(lengths: list[int], size: int) -> None:
    every = [Segment(sum(lengths[:i]), n, i, 0) for i, n in enumerate(lengths)]
    segments = Segments.of(every)
    tiles = segments.tiles(size).tolist()
    assert [row for first, count in tiles for row in range(first, first + count)] == list(range(sum(lengths)))
    for first, count in tiles:
        assert 1 <= count <= size and len(set(segments.sequences[first : first + count].tolist())) == 1
    assert segments.tiles(size) is segments.tiles(size)


@pytest.mark.parametrize("segment", [Segment(2, 4, 0, 0), Segment(-1, 2, 0, 0), Segment(0, 0, 0, 0)])
def test_rows_follow_one_another(segment: Segment) -> None:
    with pytest.raises(ValueError, match="must have a length and begin at row 0"):
        Segments.of([segment])


def test_check() -> None:
    tables = torch.zeros(2, 3, dtype=torch.int32)
    Segments.of(SEGMENTS).check(8, tables, 4)
    with pytest.raises(ValueError, match="the segments have 8 rows, the batch has 9"):
        Segments.of(SEGMENTS).check(9, tables, 4)
    for bad in (Segment(0, 1, 2, 0), Segment(0, 1, -1, 0), Segment(0, 1, 0, 12), Segment(0, 1, 0, -1)):
        with pytest.raises(ValueError, match=r"Segment\(row="):
            Segments.of([bad]).check(1, tables, 4)


def test_cu_seqlens(device: str) -> None:
    lengths = CuSeqlens.of([3, 1, 5], device)
    assert (lengths.offsets, lengths.rows, lengths.longest, len(lengths)) == ((0, 3, 4, 9), 9, 5, 3)
    assert list(lengths) == [(0, 3), (3, 4), (4, 9)]
    assert lengths.on_device.tolist() == [0, 3, 4, 9] and lengths.on_device.dtype == torch.int32
    nothing = CuSeqlens.of([], device)
    assert (nothing.rows, nothing.longest, len(nothing), nothing.on_device.tolist()) == (0, 0, 0, [0])
