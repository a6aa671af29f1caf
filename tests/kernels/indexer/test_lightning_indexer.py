"""The lightning indexer against scoring and sorting in full; memory that does not grow with S²."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from dsa_engine.kernels.formats.cache_format import FP8, index_key_format
from dsa_engine.kernels.indexer.lightning_indexer import _pieces, lightning_indexer
from dsa_engine.kernels.rows.segment import Segment, Segments
from dsa_engine.kernels.runtime import cpu
from dsa_engine.kernels.runtime.launch import INTERPRETED

pytestmark = pytest.mark.usefixtures("on_a_cpu")

Scatter = Callable[..., tuple[torch.Tensor, torch.Tensor]]
HEADS, DIM = 3, 8


def select(q: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
    """The operation, with the key format that belongs to the width and dtype of the queries."""
    return lightning_indexer(q, *arguments, key_format=index_key_format(q.shape[-1], q.dtype), **options)


def whole_numbers(*shape: int, seed: int) -> torch.Tensor:
    """Small integers: sums of their products are exact in float32, so that ties are real and no rounding hides them."""
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed)).float()


def naive(q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, position: int, k: int) -> list[int]:
    products = torch.einsum("hd,sd->hs", q.double(), keys[: position + 1].double()).clamp(min=0)
    scores = (weights.double() @ products).tolist()
    best = sorted(range(position + 1), key=lambda s: (-scores[s], s))[:k]
    return sorted(best) + [-1] * (k - len(best))


def slots_at(positions: list[int], table: torch.Tensor, page_size: int) -> list[int]:
    return [-1 if s < 0 else int(table[s // page_size]) * page_size + s % page_size for s in positions]


# Two runs of one sequence (as head-tail gives), one of a second, one token of a third; in any order of rows.
RAGGED = [
    Segment(row=0, length=9, sequence=0, start=12),
    Segment(row=9, length=7, sequence=0, start=204),
    Segment(row=16, length=10, sequence=1, start=50),
    Segment(row=26, length=1, sequence=2, start=130),
]
# One or two tokens of each sequence.
DECODE = [Segment(0, 2, 0, 209), Segment(2, 1, 1, 59), Segment(3, 2, 2, 0), Segment(5, 1, 2, 130)]


def check(
    runs: list[Segment],
    heads: int,
    dim: int,
    page_size: int,
    dtype: torch.dtype,
    device: str,
    scatter: Scatter,
    k: int = 16,
    workspace: int = 256 << 20,
) -> None:
    """Selection in sequences of 211, 60 and 131 tokens, against sorting in full."""
    keys = [whole_numbers(n, dim, seed=n) for n in (211, 60, 131)]
    rows = runs[-1].row + runs[-1].length
    q, weights = whole_numbers(rows, heads, dim, seed=1), whole_numbers(rows, heads, seed=2)
    if dtype == torch.float8_e4m3fn:
        # Powers of two: the scores stay exact.
        scales = [torch.ldexp(torch.ones(len(x), 1), torch.arange(len(x))[:, None] % 3) for x in keys]
        pool, tables = pack(keys, scales, page_size, scatter)
        keys = [x * scale for x, scale in zip(keys, scales, strict=True)]
    else:
        pool, tables = scatter([x.to(dtype) for x in keys], page_size)
    slots = select(
        q.to(device, dtype),
        weights.to(device),
        pool.to(device),
        tables.to(device),
        Segments.of(runs, device),
        k,
        workspace=workspace,
    )
    assert slots.dtype == torch.int32 and slots.shape == (rows, k)
    selected = slots.tolist()
    for s in runs:
        for row, position in zip(range(s.row, s.row + s.length), range(s.start, s.end), strict=True):
            wanted = naive(q[row], weights[row], keys[s.sequence], position, k)
            assert selected[row] == slots_at(wanted, tables[s.sequence], page_size)


def pack(
    keys: list[torch.Tensor], scales: list[torch.Tensor], page_size: int, scatter: Scatter
) -> tuple[torch.Tensor, torch.Tensor]:
    """An FP8 pool of ``keys`` that e4m3 holds, in scattered pages."""
    values, tables = scatter(keys, page_size)
    pool = torch.empty(*values.shape[:2], values.shape[2] + 4, dtype=torch.uint8)
    pool_values, pool_scales = index_key_format(pool.shape[2] - 4, FP8).views(pool)
    pool_values.view(torch.uint8).copy_(values.to(torch.float8_e4m3fn).view(torch.uint8))
    pool_scales.copy_(scatter(scales, page_size)[0][..., 0])
    return pool, tables


@pytest.mark.parametrize("page_size", [1, 7, 64, 100])
@pytest.mark.parametrize("workspace", [1, 20_000, 256 << 20])  # bytes: pieces of a row, of several, one piece
def test_ragged_batch(page_size: int, workspace: int, device: str, scattered_pages: Scatter) -> None:
    if INTERPRETED and (page_size, workspace) not in ((7, 1), (1, 20_000)):
        pytest.skip("enough for the interpreter: the others differ in what it has seen")
    check(RAGGED, HEADS, DIM, page_size, torch.float32, device, scattered_pages, workspace=workspace)


@pytest.mark.parametrize("runs", [RAGGED, DECODE], ids=["prefill", "decode"])
@pytest.mark.parametrize("heads", [32, 64])
def test_sizes_of_known_models(
    runs: list[Segment], heads: int, dtype: torch.dtype, device: str, scattered_pages: Scatter
) -> None:
    if INTERPRETED and runs is RAGGED and (heads, dtype) != (64, torch.float16):
        pytest.skip("the selection takes long in the interpreter")
    check(runs, heads, 128, 64, dtype, device, scattered_pages, k=48)


@pytest.mark.parametrize("runs", [RAGGED, DECODE], ids=["prefill", "decode"])
@pytest.mark.parametrize("heads, dim, page_size", [(64, 128, 64), (32, 128, 7), (12, 32, 1)])
def test_fp8(runs: list[Segment], heads: int, dim: int, page_size: int, device: str, scattered_pages: Scatter) -> None:
    if INTERPRETED and runs is RAGGED and heads != 32:
        pytest.skip("the selection takes long in the interpreter")
    check(runs, heads, dim, page_size, torch.float8_e4m3fn, device, scattered_pages, workspace=40_000)


@pytest.mark.parametrize("order", ["random", "rising", "falling", "few values", "nothing finite"])
@pytest.mark.parametrize("total, k", [(1500, 1), (1500, 64), (700, 512)])
def test_the_best_of_long_rows(order: str, total: int, k: int, device: str) -> None:
    """Scores that arrive in any order, tie, or are no numbers: one head and one dimension, so that they are the keys.

    NaN is above everything and −inf is never selected, as in :func:`.topk.select_topk`.
    """
    if order == "nothing finite" and (INTERPRETED or device != "cpu"):
        pytest.skip("one head and one dimension are padded with zeros there, and zero times infinity is no number")
    if INTERPRETED and (order, k) != ("few values", 64):
        pytest.skip("the selection takes long in the interpreter, and has its own tests there")
    g = torch.Generator().manual_seed(k)
    keys = torch.randn(total, generator=g).abs()
    if order in ("rising", "falling"):
        keys = keys.sort(descending=order == "falling").values
    elif order == "few values":
        keys = torch.randint(0, 3, (total,), generator=g).float()
    elif order == "nothing finite":
        keys = torch.tensor([0.0, -0.0, 1.0, math.inf, math.nan])[torch.randint(0, 5, (total,), generator=g)]
    rows = 5
    weights = torch.tensor([1.0, -1.0, -0.0, 2.0, 0.5])[:, None]
    scores = weights * torch.where(keys < 0, 0.0, keys)
    slots = select(
        torch.ones(rows, 1, 1, device=device), weights.to(device), keys.view(-1, 1, 1).to(device),
        torch.arange(total, device=device).int()[None], Segments.of([Segment(0, rows, 0, total - rows)], device), k,
    ).tolist()  # fmt: skip  # pages of one token, in order: slots are positions
    for row, line in enumerate(scores.tolist()):
        seen = [s for s in range(total - rows + row + 1) if line[s] != -math.inf]
        best = sorted(seen, key=lambda s: (line[s] == line[s], -line[s] if line[s] == line[s] else 0, s))[:k]
        assert slots[row] == sorted(best) + [-1] * (k - len(best))


@pytest.mark.skipif(INTERPRETED, reason="of the C++ kernel only")
@pytest.mark.parametrize("threads", [1, 3])
def test_threads_change_nothing(threads: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    g = torch.Generator().manual_seed(0)
    q, weights = torch.randn(300, 5, 16, generator=g), torch.randn(300, 5, generator=g)
    pool, tables = torch.randn(300, 3, 16, generator=g), torch.randperm(300, generator=g).int()[None]
    given = [x.to(device) for x in (q, weights, pool, tables)]
    segments = Segments.of([Segment(0, 300, 0, 600)], device)
    wanted = select(*given, segments, 64)
    monkeypatch.setattr(cpu, "threads_for", lambda work: threads)
    assert torch.equal(select(*given, segments, 64), wanted)


def test_no_queries(device: str, scattered_pages: Scatter) -> None:
    pool, tables = scattered_pages([torch.zeros(3, DIM)], 4)
    q, weights = torch.empty(0, HEADS, DIM, device=device), torch.empty(0, HEADS, device=device)
    slots = select(q, weights, pool.to(device), tables.to(device), Segments.of([], device), 6)
    assert slots.shape == (0, 6)


def test_a_batch_in_one_piece_makes_its_tiles_once(device: str, scattered_pages: Scatter) -> None:
    """All layers of a step select with the same segments."""
    pool, tables = scattered_pages([whole_numbers(9, DIM, seed=0)], 4)
    q, weights = whole_numbers(5, HEADS, DIM, seed=1).to(device), whole_numbers(5, HEADS, seed=2).to(device)
    segments = Segments.of([Segment(0, 5, 0, 4)], device)
    select(q, weights, pool.to(device), tables.to(device), segments, 3)
    assert len(segments._tiles) == (1 if cpu.runs_kernel(q) else 0)


@pytest.mark.skipif(INTERPRETED or torch.cuda.is_available(), reason="of what PyTorch allocates on a CPU")
@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("start, length", [(19_000, 1_000), (0, 4_000)])
def test_memory_stays_within_the_workspace(
    start: int, length: int, ties: bool, peak_memory: Callable[..., int]
) -> None:
    """All scores of 1,000 queries over 20,000 tokens would take 80 MB, and the products of 16 heads 1.3 GB."""
    total, heads, dim, k, workspace = start + length, 16, 16, 64, 8 << 20
    g = torch.Generator().manual_seed(0)
    q, weights = torch.randn(length, heads, dim, generator=g), torch.randn(length, heads, generator=g)
    weights *= not ties  # then every score is zero
    pool = torch.randn(-(-total // 64), 64, dim, generator=g)
    tables = torch.arange(len(pool), dtype=torch.int32)[None]
    segments = [Segment(0, length, 0, start)]

    def run() -> Any:
        return select(q, weights, pool, tables, Segments.of(segments), k, workspace=workspace)

    result = length * k * 4
    peak = peak_memory(run)
    print(f"peak {peak / 2**20:.1f} MiB")
    # Rows in which scores tie for the last selected position are selected a second time, with more temporaries.
    assert peak < workspace * (1.5 if ties else 1) + result + (1 << 20)


def test_pieces_begin_at_whole_tiles() -> None:
    """Another address is another variant of a kernel; 16 bytes are 4 numbers. Few rows are not rounded."""
    segments = Segments.of([Segment(0, 1000, 0, 0), Segment(1000, 77, 1, 900)], "cpu")
    for elements in (70_000, 200_000, 1_000_000):
        pieces = list(_pieces(segments, elements))
        assert [first for first, _ in pieces[1:]] == [last for _, last in pieces[:-1]] and pieces[-1][1] == 1077
        assert all(first % 64 == 0 for first, _ in pieces)
        assert all((last - first) * min(1000, max(last, 977)) <= elements for first, last in pieces)
    assert len(list(_pieces(segments, 1000))) > 900, "no piece is rounded to nothing"


@pytest.mark.skipif(INTERPRETED, reason="what the CPU's own kernel and the reference are given")
def test_block_tables_of_other_types_and_pages_outside_of_the_pool(scattered_pages: Scatter) -> None:
    pool, tables = scattered_pages([whole_numbers(30, DIM, seed=1)], 4)
    q, weights = whole_numbers(6, HEADS, DIM, seed=2), torch.rand(6, HEADS)
    segments = Segments.of([Segment(0, 6, 0, 20)])
    wanted = select(q, weights, pool, tables, segments, 5)
    assert torch.equal(select(q, weights, pool, tables.long(), segments, 5), wanted)
    tables[0, 7] = -1  # after all visible pages
    assert torch.equal(select(q, weights, pool, tables, segments, 5), wanted)
    for page in (-1, len(pool)):
        tables[0, 6] = page
        with pytest.raises(IndexError):
            select(q, weights, pool, tables, segments, 5)
    with pytest.raises(ValueError, match="k must be at least 1, not 0"):
        select(q, weights, pool, tables, segments, 0)


@pytest.mark.skipif(INTERPRETED, reason="of the C++ kernel, which looks at pages")
@pytest.mark.parametrize("length", [3, 6], ids=["by rows", "by panels"])
def test_rows_of_padding_see_nothing(length: int) -> None:
    """Behind the others (drafts on a CPU), or all: none hides where those look, and their own pages are not read."""
    pool, tables = torch.randn(4, 2, DIM), torch.tensor([[0, 3, 2, 1, 10]], dtype=torch.int32)
    q, weights = torch.randn(length, HEADS, DIM), torch.rand(length, HEADS)
    if not cpu.serves(q):
        pytest.skip("the reference looks at no page before it reads it")
    segments = Segments.of([Segment(0, length, 0, 10 - length)])
    segments.visible[:] = torch.tensor([7, 8, *[0] * (length - 2)])
    slots = select(q, weights, pool, tables, segments, 8)
    assert slots[:2].tolist() == [[0, 1, 6, 7, 4, 5, 2, -1], [0, 1, 6, 7, 4, 5, 2, 3]] and bool((slots[2:] == -1).all())
    tables[0, 1] = 10
    with pytest.raises(IndexError):
        select(q, weights, pool, tables, segments, 8)
    segments.visible.zero_()
    assert bool((select(q, weights, pool, tables, segments, 8) == -1).all())
