"""Rows of a paged pool: written, read and found where plain arithmetic says that they are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dsa_engine.kernels.paged import read_rows, slots_of, store_rows

Scatter = Callable[..., tuple[torch.Tensor, torch.Tensor]]


@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_store_in_any_order_and_nowhere(dtype: torch.dtype, slot_dtype: torch.dtype) -> None:
    pool = torch.full((4, 3, 5), -7.0, dtype=dtype)
    rows = torch.randn(6, 5, generator=torch.Generator().manual_seed(0))
    slots = [11, -1, 0, 4, -1, 3]
    store_rows(pool, rows, torch.tensor(slots, dtype=slot_dtype))
    flat = pool.view(-1, 5)
    for slot in range(12):
        expected = rows[slots.index(slot)].to(dtype) if slot in slots else torch.full((5,), -7.0, dtype=dtype)
        assert torch.equal(flat[slot], expected)


def test_store_nothing() -> None:
    pool = torch.zeros(2, 2, 3)
    store_rows(pool, torch.ones(2, 3), torch.tensor([-1, -1]))
    store_rows(pool, torch.ones(0, 3), torch.empty(0, dtype=torch.int32))
    assert not pool.any()


def test_store_rejects_what_does_not_fit() -> None:
    pool = torch.zeros(2, 2, 3)
    with pytest.raises(ValueError, match=r"\(2, 3\) rows do not fit 3 slots of width 3"):
        store_rows(pool, torch.ones(2, 3), torch.tensor([0, 1, 2]))
    with pytest.raises(ValueError, match=r"\(2, 4\) rows"):
        store_rows(pool, torch.ones(2, 4), torch.tensor([0, 1]))


@pytest.mark.parametrize("page_size", [1, 4, 7, 64])
def test_read_every_range(page_size: int, scattered_pages: Scatter) -> None:
    rows = [torch.randn(n, 3, generator=torch.Generator().manual_seed(n)) for n in (23, 9)]
    pool, tables = scattered_pages(rows, page_size)
    for number, expected in enumerate(rows):
        for start in range(len(expected)):
            for stop in range(start, len(expected) + 1):
                assert torch.equal(read_rows(pool, tables[number], start, stop), expected[start:stop])


@given(st.integers(1, 9), st.lists(st.tuples(st.integers(0, 2), st.integers(-1, 26)), max_size=40), st.booleans())
def test_slots(page_size: int, wanted: list[tuple[int, int]], matrix: bool) -> None:
    pages = 27 // page_size + 1
    tables = torch.randperm(3 * pages, generator=torch.Generator().manual_seed(page_size)).view(3, pages).int()
    sequences = torch.tensor([s for s, _ in wanted], dtype=torch.int64)
    positions = torch.tensor([p for _, p in wanted], dtype=torch.int64)
    expected = [-1 if p < 0 else int(tables[s, p // page_size]) * page_size + p % page_size for s, p in wanted]
    if matrix:  # [T, k], as the indexer's selection
        positions = torch.stack((positions, positions.clamp(max=0)), dim=1).int()
        first = [-1 if p < 0 else int(tables[s, 0]) * page_size for s, p in wanted]
        slots = slots_of(positions, tables, sequences, page_size)
        assert slots.tolist() == [list(pair) for pair in zip(expected, first, strict=True)]
    else:
        slots = slots_of(positions, tables, sequences, page_size)
        assert slots.tolist() == expected
    assert slots.dtype == torch.int32 and slots.shape == positions.shape


def test_slots_need_a_sequence_each() -> None:
    with pytest.raises(ValueError, match="3 rows of positions, but 2 sequence numbers"):
        slots_of(torch.zeros(3), torch.zeros(1, 1, dtype=torch.int32), torch.zeros(2), 4)


def test_what_is_stored_is_read_again() -> None:
    """Slots, store and read fit together: rows of two sequences, stored interleaved."""
    tables = torch.tensor([[5, 0, 3], [1, 4, 2]], dtype=torch.int32)
    pool = torch.zeros(6, 4, 2)
    sequences = torch.tensor([0, 1] * 10)
    positions = torch.arange(10).repeat_interleave(2)
    rows = torch.randn(20, 2, generator=torch.Generator().manual_seed(0))
    store_rows(pool, rows, slots_of(positions, tables, sequences, 4))
    for sequence in (0, 1):
        assert torch.equal(read_rows(pool, tables[sequence], 2, 10), rows[sequence::2][2:])
