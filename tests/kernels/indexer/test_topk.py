"""Selection against a sort in plain Python: ties to the lower position, ascending order, −inf never, NaN first.

The kernel's own tests give it a launch with small buffers, so that even short rows overflow them many times.
"""

from __future__ import annotations

import math
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from caches import need_memory
from compile_only import compile_only, resources
from dsa_engine.kernels.indexer.topk import (
    LARGEST_K,
    Config,
    Spans,
    select_by_kernel,
    select_by_spans,
    select_topk,
)
from dsa_engine.kernels.rows.segment import Paging, slots_of_reference
from dsa_engine.kernels.runtime.launch import INTERPRETED

NAN, INF = math.nan, math.inf


def by_sorting(row: list[float], k: int) -> tuple[list[int], int]:
    """The best first: NaN, then the greater, then the lower position."""
    order = sorted(
        (i for i, score in enumerate(row) if score != -INF),
        key=lambda i: (row[i] == row[i], 0.0 if row[i] != row[i] else -row[i], i),
    )[:k]
    return sorted(order) + [-1] * (k - len(order)), len(order)


def compare(selected: tuple[torch.Tensor, torch.Tensor], rows: list[list[float]], k: int) -> None:
    positions, counts = selected
    expected = [by_sorting(row, k) for row in rows]
    assert positions.dtype == counts.dtype == torch.int32
    assert positions.shape == (len(rows), k) and counts.shape == (len(rows),)
    assert positions.tolist() == [p for p, _ in expected]
    assert counts.tolist() == [c for _, c in expected]


def check(scores: torch.Tensor, k: int) -> None:
    before = scores.clone()
    compare(select_topk(scores, k), scores.tolist(), k)
    assert torch.equal(scores.view(torch.int32), before.view(torch.int32)), "the scores were changed"


FEW = st.sampled_from([-INF, -1.5, -0.0, 0.0, 1e-30, 0.5, 3.0, INF, NAN, -NAN])


@settings(max_examples=20 if INTERPRETED else 200)
@given(
    st.integers(1, 30).flatmap(lambda w: st.lists(st.lists(FEW, min_size=w, max_size=w), min_size=1, max_size=5)),
    st.integers(1, 40),
)
def test_rows_full_of_ties(device: str, rows: list[list[float]], k: int) -> None:
    check(torch.tensor(rows, dtype=torch.float32, device=device), k)


@pytest.mark.parametrize("width, k", [(1, 1), (777, 64), (3001, 256), (4096, 4096), (100, 101), (513, 512)])
@pytest.mark.parametrize("levels", [0, 5, 300])
def test_wide_rows(width: int, k: int, levels: int, device: str) -> None:
    """Random scores, and scores rounded to a few levels, under a causal mask with rows of every length."""
    rows = 4 if INTERPRETED else 23
    scores = torch.randn(rows, width, generator=torch.Generator().manual_seed(width + levels))
    if levels:
        scores = (scores * levels / 4).round() * 4 / levels
    visible = torch.arange(rows) * width // (rows - 1)  # from none to all
    scores.masked_fill_(torch.arange(width) >= visible[:, None], -INF)
    check(scores.to(device), k)


def test_lengths(device: str) -> None:
    """Columns beyond a row's length do not count, whatever they hold; a row shorter than k passes through."""
    scores = torch.randn(6, 50, generator=torch.Generator().manual_seed(0))
    lengths = torch.tensor([0, 1, 7, 8, 30, 50], dtype=torch.int32)
    masked = scores.masked_fill(torch.arange(50) >= lengths[:, None], -INF)
    expected = [by_sorting(row, 8) for row in masked.tolist()]
    undefined = torch.tensor([NAN, INF, 1e30])[torch.randint(3, (6, 50))]
    scores = torch.where(masked == -INF, undefined, scores).to(device)
    positions, counts = select_topk(scores, 8, lengths.to(device))
    assert positions.tolist() == [p for p, _ in expected] and counts.tolist() == [c for _, c in expected]


def test_a_view_and_no_rows(device: str) -> None:
    wide = torch.randn(6, 90, generator=torch.Generator().manual_seed(0)).to(device)
    check(wide[::2, 10:70], 7)
    check(wide[:, ::2], 7)
    positions, counts = select_topk(torch.empty(0, 9, device=device), 4)
    assert positions.shape == (0, 4) and counts.shape == (0,)


KERNEL_ONLY = pytest.mark.skipif(not INTERPRETED and not torch.cuda.is_available(), reason="needs the kernel to run")
# Buffers for 128 candidates, worked on 64 at a time; chunks of 256 or 512 scores; without a guess, and with one.
PLAIN = Config(warps=1, groups=2, piece=64, capacity=128, sample=0, resident=1, registers=128)
GUESSING = Config(warps=1, groups=4, piece=64, capacity=128, sample=128, resident=1, registers=128)


def awkward_rows(width: int, seed: int) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    x, chance = torch.randn(width, generator=g), torch.rand(width, generator=g)
    tiny = torch.finfo(torch.float32).smallest_normal
    return {
        "random": x,
        "ascending": x.sort().values,
        "descending": x.sort(descending=True).values,
        "negative": -x.abs(),
        "equal": torch.full((width,), 0.25),
        "zeros of both signs": torch.where(chance < 0.5, 0.0, -0.0),
        "zeros and some below": torch.where(chance < 0.03, -1.0, torch.where(chance < 0.5, 0.0, -0.0)),
        "mostly zero": x.clamp(min=1.5) - 1.5,
        "few levels": (2 * x).round(),
        "nothing": torch.full((width,), -INF),
        "little": torch.where(chance < 0.01, x, -INF),
        "some NaN of both signs": torch.where(chance < 0.01, NAN, torch.where(chance < 0.02, -NAN, x)),
        "negative NaN over equals": torch.where(chance < 0.01, -NAN, 0.25),
        "only NaN": torch.full((width,), NAN),
        "infinities": torch.where(chance < 0.1, INF, torch.where(chance < 0.5, -INF, x)),
        "subnormal": x * tiny / 64,
        "the greatest": torch.where(chance < 0.5, -1.0, 1.0) * torch.finfo(torch.float32).max,
        "best at the sampled columns": torch.where(torch.arange(width) % (width // 2) < 64, x + 9, x),
        "best between": torch.where(torch.arange(width) % (width // 2) < 64, x - 9, x),
    }


@KERNEL_ONLY
@pytest.mark.parametrize("config, k", [(PLAIN, 1), (PLAIN, 50), (GUESSING, 9), (GUESSING, 64)])
def test_buffers_that_overflow(config: Config, k: int, device: str) -> None:
    """k is at most half of the buffer: rows are cut down many times while they are read."""
    rows = awkward_rows(443, seed=k)
    scores = torch.stack(list(rows.values()))
    positions, counts = select_by_kernel(scores.to(device), k, None, config)
    for i, name in enumerate(rows):
        assert (name, positions[i].tolist(), int(counts[i])) == (name, *by_sorting(scores[i].tolist(), k))


# A row fits in a span, or has up to seven; a sample of half of a span, or as long as one.
SMALL_SPANS = [(Spans(64, 32, 1), 1), (Spans(64, 64, 1), 32), (Spans(512, 64, 1), 50)]


@KERNEL_ONLY
@pytest.mark.parametrize("config, k", SMALL_SPANS)
def test_spans_of_rows(config: Spans, k: int, device: str) -> None:
    """In one launch: where the floor leaves too few candidates, more than a program has at once, or just enough."""
    rows = awkward_rows(443, seed=k)
    scores, finished = torch.stack(list(rows.values())), torch.zeros(len(rows), dtype=torch.int32, device=device)
    positions, counts = select_by_spans(scores.to(device), k, None, config, finished=finished)
    for i, name in enumerate(rows):
        assert (name, positions[i].tolist(), int(counts[i])) == (name, *by_sorting(scores[i].tolist(), k))
    assert (finished == 0).all()


@KERNEL_ONLY
@pytest.mark.parametrize("widest", [811, 128])
def test_slots_of_spans(widest: int, device: str) -> None:
    """Rows that end early, or before their first span does; into rows of a table, from a view of every second row."""
    scores = torch.stack(list(awkward_rows(811, seed=widest).values())).to(device)[::2, :widest]
    lengths = torch.randint(0, widest + 1, scores.shape[:1], generator=torch.Generator().manual_seed(widest))
    lengths[:5] = torch.tensor([widest, 0, 1, 64, 65])
    masked = scores.cpu().masked_fill(torch.arange(widest) >= lengths[:, None], -INF)
    lengths, config = lengths.int().to(device), Spans(64, 32, 1)
    positions, counts = select_by_spans(scores, 31, lengths, config)
    compare((positions, counts), masked.tolist(), 31)
    paging = scattered(len(scores), widest, 16, device)
    tables = paging.block_tables.repeat(1, 2)[:, : paging.block_tables.shape[1]]  # not contiguous
    out = torch.full((len(scores) + 1, 31), 7, dtype=torch.int32, device=device)
    slots, counted = select_by_spans(scores, 31, lengths, config, paging._replace(block_tables=tables), out[1:])
    assert torch.equal(out[1:], slots_of_reference(positions, *paging)) and torch.equal(counts, counted)
    assert slots.data_ptr() == out[1:].data_ptr() and (out[0] == 7).all()


@KERNEL_ONLY
@pytest.mark.parametrize("rows", [1, 3])
def test_spans_in_decode(rows: int, device: str) -> None:
    """As launched for the model's k: all rows several times in a row with the same counters."""
    scores = torch.randn(rows, 20_000, generator=torch.Generator().manual_seed(rows)).to(device)
    lengths = torch.tensor([20_000, 12_345, 3], dtype=torch.int32)[:rows]
    masked = scores.cpu().masked_fill(torch.arange(20_000) >= lengths[:, None], -INF)
    finished = torch.zeros(rows, dtype=torch.int32, device=device)
    for k in (2048,) if INTERPRETED else (2048, LARGEST_K, 100):
        selected = select_by_spans(scores, k, lengths.to(device), Spans(), finished=finished)
        compare(selected, masked.tolist(), k)


@pytest.mark.skipif(INTERPRETED, reason="nothing is compiled under the interpreter")
@pytest.mark.parametrize("chip", [80, 90, 100, 120])
def test_compiled_spans(chip: int) -> None:
    """No spills; scores are read 16 bytes at a time and candidates, whose targets are not adjacent, stored singly. All
    threads have stored when one counts."""
    ints = torch.empty(8, dtype=torch.int32)
    paging = Paging(torch.empty(1, 2048, dtype=torch.int32), ints, 64)
    with compile_only(chip) as launched:
        select_topk(torch.empty(8, 131_072), 2048, ints, paging=paging, finished=ints)
    (kernel,) = launched
    assert resources(kernel).spilled == 0
    assert len(re.findall(r"ld\.global[.\w]*\.v4\.b32", kernel.asm["ptx"])) >= 4
    assert not re.findall(r"st\.global\S*\.v\d", kernel.asm["ptx"])
    before, after = kernel.asm["ptx"].split("atom.global.gpu.acq_rel")
    assert "t.global" not in before.rpartition("bar.sync")[2] and "bar.sync" in after.partition("ld.global")[0]


def scattered(rows: int, width: int, page_size: int, device: str) -> Paging:
    """Rows of three sequences, in turn from the last; after a row's own pages, its table holds no page."""
    pages = width // page_size + 1
    tables = torch.randperm(3 * pages, generator=torch.Generator().manual_seed(width)).int().view(3, pages)
    none = torch.full((3, 2), -1, dtype=torch.int32)
    return Paging(torch.cat((tables, none), dim=1).to(device), (2 - torch.arange(rows).int() % 3).to(device), page_size)


@pytest.mark.parametrize(
    "rows, width, k, page_size",
    [(1, 20_000, 100, 64), (4, 777, 64, 7), (3, 50, 60, 1), (2, 4200, LARGEST_K + 1, 64), (0, 9, 4, 4)],
)
def test_slots(rows: int, width: int, k: int, page_size: int, device: str) -> None:
    """Slots are those of the positions: of rows that end early, in slices, and from the reference beyond its k."""
    scores = torch.randn(rows, width, generator=torch.Generator().manual_seed(k)).to(device)
    lengths = torch.tensor([width, width // 2, 3, 0], dtype=torch.int32)[:rows].to(device)
    paging = scattered(rows, width, page_size, device)
    positions, counts = select_topk(scores, k, lengths)
    slots, counted = select_topk(scores, k, lengths, paging=paging)
    assert slots.dtype == torch.int32 and torch.equal(counts, counted)
    assert torch.equal(slots, slots_of_reference(positions, *paging))
    into = torch.full((rows, k), 7, dtype=torch.int32, device=device)
    assert select_topk(scores, k, lengths, paging=paging, out=into)[0] is into and torch.equal(into, slots)


@KERNEL_ONLY
def test_slots_from_buffers_that_overflow(device: str) -> None:
    """While candidates are cut down, they are positions."""
    scores = torch.stack(list(awkward_rows(811, seed=1).values())[::3]).to(device)
    lengths = torch.arange(len(scores), dtype=torch.int32, device=device) * 811 // (len(scores) - 1)
    paging = scattered(len(scores), 811, 64, device)
    tables = paging.block_tables.repeat(1, 2)[:, : paging.block_tables.shape[1]]  # not contiguous
    positions, counts = select_by_kernel(scores, 37, lengths, PLAIN)
    slots, counted = select_by_kernel(scores, 37, lengths, PLAIN, paging._replace(block_tables=tables))
    assert torch.equal(slots, slots_of_reference(positions, *paging)) and torch.equal(counts, counted)


def test_the_models_k(device: str) -> None:
    scores = torch.randn(2, 5000, generator=torch.Generator().manual_seed(0)).to(device)
    check(scores, 2048)
    check(scores[:, :2048], 2048)
    positions, counts = select_topk(scores, 2048, torch.tensor([2000, 4999], dtype=torch.int32, device=device))
    assert positions[0].tolist() == [*range(2000), *[-1] * 48] and counts.tolist() == [2000, 2048]


def test_offsets_beyond_32_bits(device: str) -> None:
    """The last row begins 2^31 elements after the first: 9 GB, of which three rows are touched."""
    need_memory(device, 10 << 30)
    stride = (1 << 30) + 16
    rows = torch.empty(2 * stride + 700, device=device).as_strided((3, 700), (stride, 1))
    rows.copy_(torch.randn(3, 700, generator=torch.Generator().manual_seed(0)))
    check(rows, 20)


@pytest.mark.skipif(INTERPRETED, reason="nothing is compiled under the interpreter")
@pytest.mark.parametrize(
    "chip, rows, width",
    [*((chip, rows, 131_072) for chip in (80, 90, 100) for rows in (64, 512)), (90, 300, 5001)],
)
def test_compiled(chip: int, rows: int, width: int) -> None:
    """No spills, scores read 16 bytes at a time where rows are aligned; and selected scores are stored one by one:
    their targets are declared adjacent, which they are not, for the sake of the layout."""
    ints = torch.empty(rows, dtype=torch.int32)
    with compile_only(chip) as launched:
        select_topk(torch.empty(rows, width), 2048, ints, paging=Paging(torch.empty_like(ints)[:, None], ints, 64))
    (kernel,) = launched
    ptx, taken = kernel.asm["ptx"], resources(kernel)
    assert taken.spilled == 0 and taken.shared < 48 << 10
    assert re.search(r"ld\.global[.\w]*\.v4\.[bfu]32|ld\.global[.\w]*\.v2\.[bfu]64", ptx)
    groups, sampled = (4, 8) if taken.warps == 4 else (2, 2)
    assert len(re.findall(r"st\.global\S*\.v\d", ptx)) == groups + sampled


@pytest.mark.parametrize("width", [300, 20])
def test_into_rows_of_a_table(width: int, device: str) -> None:
    scores = torch.randn(3, width, generator=torch.Generator().manual_seed(0)).to(device)
    table = torch.full((5, 30), 7, dtype=torch.int32, device=device)
    selected = select_topk(scores, 30, out=table[1:4])
    compare(selected, scores.tolist(), 30)
    assert torch.equal(table[1:4], selected[0]) and (table[[0, 4]] == 7).all()
