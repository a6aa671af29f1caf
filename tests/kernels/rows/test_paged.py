"""Rows of a paged pool: written and read where plain arithmetic says, and slots of positions."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from caches import need_memory
from dsa_engine.kernels.rows.paged import gather_rows, read_rows
from dsa_engine.kernels.rows.segment import slots_of
from dsa_engine.kernels.rows.store_rows import store_rows

pytestmark = pytest.mark.usefixtures("on_a_cpu")

Scatter = Callable[..., tuple[torch.Tensor, torch.Tensor]]


@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.uint8])
def test_store_in_any_order_and_nowhere(dtype: torch.dtype, slot_dtype: torch.dtype, device: str) -> None:
    pool = torch.full((4, 3, 5), 7, dtype=dtype, device=device)
    rows = (torch.randn(6, 5, generator=torch.Generator().manual_seed(0)) * 3).abs().to(device, dtype)
    slots = [11, -1, 0, 4, -1, 3]
    store_rows(pool, rows, torch.tensor(slots, dtype=slot_dtype, device=device))
    flat = pool.view(-1, 5)
    for slot in range(12):
        expected = rows[slots.index(slot)] if slot in slots else torch.full_like(rows[0], 7)
        assert torch.equal(flat[slot], expected)


def test_rows_take_the_dtype_of_the_pool(device: str) -> None:
    pool, rows = torch.zeros(2, 2, 8, dtype=torch.float16, device=device), torch.randn(3, 8).to(device)
    store_rows(pool, rows, torch.tensor([2, 0, 1], device=device))
    assert torch.equal(pool.view(4, 8)[[2, 0, 1]], rows.half())


@pytest.mark.parametrize("columns", [slice(0, 36), slice(36, 48)])
def test_a_part_of_the_gathered_buffer(columns: slice, device: str) -> None:
    """Latent rows or index keys of a buffer that holds both, to more slots than one program writes."""
    buffer = torch.randn(701, 48, generator=torch.Generator().manual_seed(0)).to(device)
    slots = torch.randperm(1024, generator=torch.Generator().manual_seed(1))[:701].to(device)
    slots[::5] = -1
    rows = buffer[:, columns]
    pool = torch.full((16, 64, rows.shape[1]), float("nan"), device=device)
    store_rows(pool, rows, slots)
    has_slot = slots >= 0
    assert torch.equal(pool.view(1024, -1)[slots[has_slot]], rows[has_slot])
    assert int(pool.view(1024, -1)[:, 0].isnan().sum()) == 1024 - int(has_slot.sum())


def test_store_nothing(device: str) -> None:
    pool = torch.zeros(2, 2, 3, device=device)
    store_rows(pool, torch.ones(2, 3, device=device), torch.tensor([-1, -1], device=device))
    store_rows(pool, torch.ones(0, 3, device=device), torch.empty(0, dtype=torch.int32, device=device))
    assert not pool.any()


def test_offsets_beyond_two_to_the_31(device: str) -> None:
    """The last page of a pool, and rows, of more than 2^31 elements, of which no more is touched."""
    pages = 2**31 // (64 * 576) + 2
    need_memory(device, 2.2 * pages * 64 * 576)
    pool = torch.empty(pages, 64, 576, dtype=torch.uint8, device=device)
    pool[-1] = 0
    rows = torch.empty(2**31 + 600, dtype=torch.uint8, device=device).as_strided((2, 576), (2**31 + 16, 1))
    rows.copy_(torch.arange(2 * 576).view(2, 576) % 251)
    store_rows(pool, rows, torch.tensor([pages * 64 - 1, pages * 64 - 64], device=device))
    assert torch.equal(pool[-1, [63, 0]], rows) and not pool[-1, 1:63].any()


@pytest.mark.parametrize("page_size", [1, 4, 7, 64])
def test_read_every_range(page_size: int, scattered_pages: Scatter) -> None:
    rows = [torch.randn(n, 3, generator=torch.Generator().manual_seed(n)) for n in (23, 9)]
    pool, tables = scattered_pages(rows, page_size)
    for number, expected in enumerate(rows):
        for start in range(len(expected)):
            for stop in range(start, len(expected) + 1):
                assert torch.equal(read_rows(pool, tables[number], start, stop), expected[start:stop])


@given(st.integers(1, 9), st.lists(st.tuples(st.integers(0, 2), st.integers(-1, 26)), max_size=40), st.booleans())
def test_slots(device: str, page_size: int, wanted: list[tuple[int, int]], matrix: bool) -> None:
    pages = 27 // page_size + 1
    tables = (
        torch.randperm(3 * pages, generator=torch.Generator().manual_seed(page_size)).view(3, pages).int().to(device)
    )
    sequences = torch.tensor([s for s, _ in wanted], dtype=torch.int64, device=device)
    positions = torch.tensor([p for _, p in wanted], dtype=torch.int64, device=device)
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


@pytest.mark.parametrize("shape", [(5, 2048), (2, 5000), (3000,), (300, 3, 5)])
def test_slots_of_more_than_one_tile(shape: tuple[int, ...], device: str) -> None:
    g = torch.Generator().manual_seed(0)
    positions = torch.randint(-1, 640, shape, generator=g, dtype=torch.int32)
    sequences = torch.randint(0, 4, shape[:1], generator=g, dtype=torch.int32)
    tables = torch.randperm(4 * 10, generator=g).view(4, 10).int()
    row = sequences.long().view(-1, *(1,) * (len(shape) - 1)).expand(shape)
    expected = tables[row, positions.long() // 64] * 64 + positions % 64
    expected[positions < 0] = -1
    slots = slots_of(positions.to(device), tables.to(device), sequences.to(device), 64)
    assert slots.dtype == torch.int32 and torch.equal(slots.cpu(), expected)


def test_what_is_stored_is_read_again(device: str) -> None:
    """Slots, store and read fit together: rows of two sequences, stored interleaved."""
    tables = torch.tensor([[5, 0, 3], [1, 4, 2]], dtype=torch.int32, device=device)
    pool = torch.zeros(6, 4, 2, device=device)
    sequences = torch.tensor([0, 1] * 10, device=device)
    positions = torch.arange(10).repeat_interleave(2).to(device)
    rows = torch.randn(20, 2, generator=torch.Generator().manual_seed(0)).to(device)
    store_rows(pool, rows, slots_of(positions, tables, sequences, 4))
    for sequence in (0, 1):
        assert torch.equal(read_rows(pool, tables[sequence], 2, 10), rows[sequence::2][2:])
    assert torch.equal(gather_rows(pool, slots_of(positions, tables, sequences, 4)), rows)
