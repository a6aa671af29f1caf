"""Index scores against the equation, written out in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from caches import need_memory
from dsa_engine.kernels.formats.cache_format import FP8, index_key_format
from dsa_engine.kernels.indexer.indexer_scores import indexer_scores
from dsa_engine.kernels.rows.segment import Segment, Segments
from dsa_engine.kernels.runtime import launch
from dsa_engine.kernels.runtime.launch import INTERPRETED

Scatter = Callable[..., tuple[torch.Tensor, torch.Tensor]]
Error = Callable[[torch.Tensor, torch.Tensor], float]

# Inputs of any type are multiplied and summed in float32. Hopper's FP8 products are summed with 14 bits.
BOUND, FP8_BOUND = 1e-5, 1e-3


def score(q: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
    """The operation, with the key format that belongs to the width and dtype of the queries."""
    return indexer_scores(q, *arguments, key_format=index_key_format(q.shape[-1], q.dtype), **options)


def naive(q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, start: int) -> torch.Tensor:
    """float64 ``[n, start + n]`` of the n queries from position ``start`` on, −inf beyond the tokens that they see."""
    count, heads, _ = q.shape
    scores = torch.full((count, start + count), float("-inf"), dtype=torch.float64)
    for t in range(count):
        seen = keys[: start + t + 1].double()
        total = torch.zeros(len(seen), dtype=torch.float64)
        for h in range(heads):
            total += weights[t, h].double() * (seen @ q[t, h].double()).clamp(min=0)
        scores[t, : start + t + 1] = total
    return scores


def seen_by(rows: torch.Tensor, segments: Segments) -> torch.Tensor:
    """The visible columns of all rows, one after the other: columns beyond them are not defined."""
    return torch.cat([row[:visible].cpu() for row, visible in zip(rows, segments.visible.tolist(), strict=True)])


def problem(count: int, heads: int, dim: int, start: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(count * 31 + start)
    q = torch.randn(count, heads, dim, generator=g).to(dtype)
    weights = torch.randn(count, heads, generator=g)
    return [q, weights, torch.randn(start + count, dim, generator=g).to(dtype)]


def batch(runs: list[tuple[int, int, int]]) -> list[Segment]:
    """Segments of ``(sequence, start, length)``, one after the other."""
    segments: list[Segment] = []
    for sequence, start, length in runs:
        segments.append(Segment(segments[-1].row + segments[-1].length if segments else 0, length, sequence, start))
    return segments


def check_batch(
    runs: list[Segment], heads: int, dim: int, page_size: int, dtype: torch.dtype, device: str, scatter: Scatter
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores of a random batch, and what they should be, visible columns only."""
    rows = runs[-1].row + runs[-1].length
    q, weights, _ = problem(rows, heads, dim, 0, dtype)
    g = torch.Generator().manual_seed(1)
    lengths = [max([1] + [s.end for s in runs if s.sequence == i]) for i in range(max(s.sequence for s in runs) + 1)]
    keys = [torch.randn(end, dim, generator=g).to(dtype) for end in lengths]
    pool, tables = scatter(keys, page_size)
    segments = Segments.of(runs, device)
    scores = score(q.to(device), weights.to(device), pool.to(device), tables.to(device), segments)
    assert scores.dtype == torch.float32 and scores.shape == (rows, segments.longest)
    expected = torch.full(scores.shape, float("-inf"), dtype=torch.float64)
    for s in runs:
        part = slice(s.row, s.row + s.length)
        expected[part, : s.end] = naive(q[part], weights[part], keys[s.sequence], s.start)
    return seen_by(scores, segments), seen_by(expected, segments)


@pytest.mark.parametrize(
    "count, heads, dim, start, page_size",
    [
        (1, 1, 8, 1, 64),
        (1, 12, 24, 700, 64),  # decode
        (2, 5, 24, 523, 7),
        (30, 3, 16, 0, 7),
        (33, 12, 24, 230, 64),
        (20, 5, 24, 255, 1),  # tiles of keys that begin amid the queries
        (17, 2, 8, 250, 100),
        (3, 64, 128, 257, 64),  # DeepSeek-V3.2
        (5, 32, 128, 290, 100),  # GLM-5
        (3, 128, 64, 70, 64),
    ],
)
def test_scores(
    count: int,
    heads: int,
    dim: int,
    start: int,
    page_size: int,
    dtype: torch.dtype,
    device: str,
    relative_error: Error,
    scattered_pages: Scatter,
) -> None:
    got, expected = check_batch([Segment(0, count, 0, start)], heads, dim, page_size, dtype, device, scattered_pages)
    assert relative_error(got, expected) < BOUND


@pytest.mark.parametrize("max_queries, heads", [(1, 64), (2, 64), (2, 32), (3, 32), (8, 64)])
def test_ragged_decode(
    max_queries: int, heads: int, dtype: torch.dtype, device: str, relative_error: Error, scattered_pages: Scatter
) -> None:
    """Up to ``max_queries`` queries of each sequence, as speculative decoding has."""
    lengths = [1, 290, 64, 129]
    runs = batch([(i, max(0, end - max_queries + i % 2), max_queries - i % 2 or 1) for i, end in enumerate(lengths)])
    got, expected = check_batch(runs, heads, 128, 64, dtype, device, scattered_pages)
    assert relative_error(got, expected) < BOUND


def test_ragged_prefill(dtype: torch.dtype, device: str, relative_error: Error, scattered_pages: Scatter) -> None:
    """Head and tail of one sequence, single tokens of two others."""
    runs = batch([(2, 20, 20), (2, 280, 20), (0, 99, 1), (1, 0, 1)])
    got, expected = check_batch(runs, 12, 16, 8, dtype, device, scattered_pages)
    assert relative_error(got, expected) < BOUND


@pytest.mark.skipif(INTERPRETED, reason="only the reference has tiles of 1,024 keys and a workspace")
@pytest.mark.parametrize("workspace", [1, 50_000, 256 << 20])
@pytest.mark.parametrize(
    "count, heads, dim, start, page_size", [(1, 12, 24, 2100, 64), (50, 5, 24, 1023, 1), (300, 2, 8, 900, 100)]
)
def test_any_workspace(
    count: int, heads: int, dim: int, start: int, page_size: int, workspace: int, device: str, scattered_pages: Scatter
) -> None:
    q, weights, keys = problem(count, heads, dim, start)
    pool, tables = scattered_pages([keys], page_size)
    segments = Segments.of([Segment(0, count, 0, start)], device)
    scores = score(q.to(device), weights.to(device), pool.to(device), tables.to(device), segments, workspace=workspace)
    expected = naive(q, weights, keys, start)
    torch.testing.assert_close(seen_by(scores, segments).double(), seen_by(expected, segments), rtol=1e-5, atol=1e-4)


def fp8_pool(
    keys: list[torch.Tensor], scales: list[torch.Tensor], page_size: int, scatter: Scatter
) -> list[torch.Tensor]:
    """Scattered pages of e4m3 keys and their scales; NaN in slots without a token."""
    codes, tables = scatter([k.view(torch.uint8).float() for k in keys], page_size)
    factors, same = scatter([s[:, None] for s in scales], page_size)
    assert torch.equal(tables, same)
    pool = torch.empty(*codes.shape[:2], codes.shape[2] + 4, dtype=torch.uint8)
    values, page_scales = index_key_format(pool.shape[2] - 4, FP8).views(pool)
    values.view(torch.uint8).copy_(codes.nan_to_num(0x7F).byte())
    page_scales.copy_(factors[..., 0])
    return [pool, tables]


@pytest.mark.parametrize("chip", [90, 80])
@pytest.mark.parametrize(
    "runs, heads, dim, page_size",
    [
        ([(0, 299, 1), (1, 0, 1), (2, 64, 1)], 64, 128, 64),
        ([(0, 140, 2), (1, 63, 2)], 32, 128, 7),
        ([(0, 270, 9), (1, 0, 5)], 64, 128, 64),
        ([(1, 30, 20), (0, 0, 7)], 32, 128, 1),
        ([(0, 99, 3)], 12, 32, 100),
    ],
)
def test_fp8(
    runs: list[tuple[int, int, int]],
    heads: int,
    dim: int,
    page_size: int,
    chip: int,
    device: str,
    relative_error: Error,
    scattered_pages: Scatter,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every finite code of e4m3 occurs, in queries with a scale in the weights and in keys with their own scale.
    Chips before sm_89 decode it in the kernel."""
    if chip != 90 and not INTERPRETED:
        pytest.skip("only the interpreter can pass for another chip")
    monkeypatch.setattr(launch, "_INTERPRETED_AS", chip)
    segments = Segments.of(batch(runs), device)
    g = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        """Codes without NaN and with few large ones, which would hide all others."""
        small, any_code = (torch.randint(top, shape, generator=g) for top in (0x50, 0x7F))
        rare, sign = torch.rand(shape, generator=g) < 0.02, torch.randint(2, shape, generator=g)
        return (torch.where(rare, any_code, small) + 0x80 * sign).byte().view(torch.float8_e4m3fn)

    lengths = [max(s.end for s in segments if s.sequence == i) for i in range(max(run[0] for run in runs) + 1)]
    keys = [draw(end, dim) for end in lengths]
    scales = [torch.rand(end, generator=g) + 0.1 for end in lengths]
    q, weights = draw(segments.rows, heads, dim), torch.randn(segments.rows, heads, generator=g)
    pool, tables = fp8_pool(keys, scales, page_size, scattered_pages)
    got = score(q.to(device), weights.to(device), pool.to(device), tables.to(device), segments)
    expected = torch.zeros(got.shape, dtype=torch.float64)
    for s in segments:
        part = slice(s.row, s.row + s.length)
        dequantized = keys[s.sequence].double() * scales[s.sequence].double()[:, None]
        expected[part, : s.end] = naive(q[part].double(), weights[part], dequantized, s.start)
    bound = BOUND if device == "cpu" else FP8_BOUND
    assert relative_error(seen_by(got, segments), seen_by(expected, segments)) < bound


@pytest.mark.parametrize("length", [1, 3])
def test_a_pool_beyond_2_to_the_31(length: int, device: str, relative_error: Error) -> None:
    """The last pages of a pool of 4 GiB; nothing else of it is touched."""
    pages = 2**31 // (64 * 128) + 6
    need_memory(device, 5 << 30)
    q, weights, keys = problem(length, 16, 128, 130, torch.float16)
    pool = torch.empty(pages, 64, 128, dtype=torch.float16, device=device)
    table = [pages - 1, pages - 5, pages - 3]
    for page, part in zip(table, keys.split(64), strict=True):
        pool[page, : len(part)] = part.to(device)
    tables = torch.tensor([table], dtype=torch.int32, device=device)
    segments = Segments.of([Segment(0, length, 0, 130)], device)
    got = seen_by(score(q.to(device), weights.to(device), pool, tables, segments), segments)
    assert relative_error(got, seen_by(naive(q, weights, keys, 130), segments)) < BOUND


@pytest.mark.skipif(not INTERPRETED, reason="takes 4 GiB wherever memory is taken before it is touched")
@pytest.mark.parametrize("length", [1, 3])
def test_queries_beyond_2_to_the_31(length: int, relative_error: Error, scattered_pages: Scatter) -> None:
    """The last of so many queries that their elements pass 2³¹."""
    heads, dim, start = 64, 128, 60
    count = 2**31 // (heads * dim) // length + 2
    rows = count * length
    some, some_weights, keys = problem(length, heads, dim, start, torch.float16)
    q, weights = torch.empty(rows, heads, dim, dtype=torch.float16), torch.empty(rows, heads)
    q[-length:], weights[-length:] = some, some_weights
    pool, tables = scattered_pages([keys], 64)
    segments = Segments.of([Segment(length * i, length, 0, start) for i in range(count)])
    # Only the last tile is computed.
    size = {1: 1, 3: 4}[length]
    segments._tiles[size] = torch.tensor([[rows - length, length]], dtype=torch.int32)
    got = score(q, weights, pool, tables, segments)[-length:]
    last = Segments.of([Segment(0, length, 0, start)])
    assert relative_error(seen_by(got, last), seen_by(naive(some, some_weights, keys, start), last)) < BOUND


@pytest.mark.skipif(not INTERPRETED, reason="takes 8 GiB wherever memory is taken before it is touched")
@pytest.mark.parametrize("length", [2, 3])
def test_scores_beyond_2_to_the_31(
    length: int, relative_error: Error, scattered_pages: Scatter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of scores so far apart that the last lies 2³¹ elements after the first."""
    q, weights, keys = problem(length, 12, 24, 60)
    pool, tables = scattered_pages([keys], 64)
    segments = Segments.of([Segment(0, length, 0, 60)])
    memory, stride = torch.empty(2**31 + 100, dtype=torch.float32), 2**31 // (length - 1)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", lambda *shape, **_: memory.as_strided(shape, (stride, 1)))
        scores = score(q, weights, pool, tables, segments)
    assert scores.stride(0) == stride
    assert relative_error(seen_by(scores, segments), seen_by(naive(q, weights, keys, 60), segments)) < BOUND


def test_a_key_that_is_nan_shows(device: str, scattered_pages: Scatter) -> None:
    """It shows in its own score only."""
    keys = torch.ones(5, 4)
    keys[2, 1] = float("nan")
    pool, tables = scattered_pages([keys], 2)
    q, weights = torch.ones(1, 3, 4, device=device), torch.ones(1, 3, device=device)
    scores = score(q, weights, pool.to(device), tables.to(device), Segments.of([Segment(0, 1, 0, 4)], device))
    assert scores.isnan().tolist() == [[False, False, True, False, False]]


def test_no_queries(device: str) -> None:
    q, weights, pool = (torch.empty(n, device=device) for n in ((0, 3, 8), (0, 3), (2, 4, 8)))
    tables = torch.zeros(1, 2, dtype=torch.int32, device=device)
    assert score(q, weights, pool, tables, Segments.of([], device)).shape == (0, 0)
