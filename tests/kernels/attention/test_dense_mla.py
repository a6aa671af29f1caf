"""Dense attention over the latent cache against a causal softmax in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from caches import need_memory
from dsa_engine.kernels.attention import _online_softmax as online_softmax
from dsa_engine.kernels.attention.dense_mla import dense_mla
from dsa_engine.kernels.formats.cache_format import FP8, latent_format
from dsa_engine.kernels.formats.row_format import LatentFormat
from dsa_engine.kernels.rows.segment import Segment, Segments
from dsa_engine.kernels.runtime import cpu
from dsa_engine.kernels.runtime.launch import INTERPRETED, batch_invariance

Scatter = Callable[..., tuple[torch.Tensor, torch.Tensor]]
Error = Callable[[torch.Tensor, torch.Tensor], float]
HEADS, WIDTH, VALUE, SCALE = 3, 20, 16, 0.3
LENGTHS = (97, 5, 40)
SEGMENTS = [
    Segment(row=0, length=12, sequence=0, start=0),
    Segment(row=12, length=7, sequence=0, start=90),
    Segment(row=19, length=1, sequence=1, start=4),
    Segment(row=20, length=10, sequence=2, start=30),
]


def plain(q: torch.Tensor, rank: int) -> LatentFormat:
    """The format of plain rows as wide as q."""
    return latent_format(rank, q.shape[-1] - rank, q.dtype)


def problem(
    dtype: torch.dtype = torch.float32, heads: int = HEADS, width: int = WIDTH
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    g = torch.Generator().manual_seed(0)
    q = torch.randn(30, heads, width, generator=g).to(dtype)
    return q, [torch.randn(n, width, generator=g).to(dtype) for n in LENGTHS]


def naive(
    q: torch.Tensor, rows: list[torch.Tensor], segments: list[Segment] = SEGMENTS, value: int = VALUE,
    scale: float = SCALE,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    out = torch.empty(*q.shape[:2], value, dtype=torch.float64)
    lse = torch.empty(q.shape[:2], dtype=torch.float64)
    for s in segments:
        for i in range(s.length):
            seen = rows[s.sequence][: s.start + i + 1].double()
            scores = q[s.row + i].double() @ seen.T * scale
            out[s.row + i] = scores.softmax(dim=-1) @ seen[:, :value]
            lse[s.row + i] = scores.exp().sum(dim=-1).log()
    return out, lse


@pytest.mark.parametrize("page_size", [1, 6, 64])
@pytest.mark.parametrize("workspace", [1, 256 << 20])
def test_ragged_batch(page_size: int, workspace: int, scattered_pages: Scatter, device: str) -> None:
    q, rows = problem()
    pool, tables = (x.to(device) for x in scattered_pages(rows, page_size))
    segments = Segments.of(SEGMENTS, device)
    out, lse = dense_mla(
        q.to(device), pool, tables, segments, row_format=plain(q, VALUE), scale=SCALE, workspace=workspace
    )
    expected, expected_lse = naive(q, rows)
    torch.testing.assert_close(out.double().cpu(), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(lse.double().cpu(), expected_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("splits", [2, 5, 16])
def test_splits_change_nothing(
    splits: int, scattered_pages: Scatter, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any number of splits gives the same result; 16 are more than there are steps, so that some have no rows."""
    monkeypatch.setattr(online_softmax, "choose_splits", lambda *_: splits)
    q, rows = problem()
    part = [Segment(0, 2, 0, 94), Segment(2, 1, 1, 0), Segment(3, 1, 2, 39)]
    pool, tables = (x.to(device) for x in scattered_pages(rows, 6))
    segments = Segments.of(part, device)
    out, lse = dense_mla(q[:4].to(device), pool, tables, segments, row_format=plain(q, VALUE), scale=SCALE)
    expected, expected_lse = naive(q[:4], rows, part)
    torch.testing.assert_close(out.double().cpu(), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(lse.double().cpu(), expected_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("splits", [1, 3])
def test_rows_that_see_nothing(
    splits: int, scattered_pages: Scatter, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where all pages of a sequence's first tokens lie on other ranks: zeros, and a log-sum-exp of −inf; by themselves,
    before others of their segment, and in all of a call."""
    monkeypatch.setattr(online_softmax, "choose_splits", lambda *_: splits)
    q, rows = problem()
    pool, tables = (x.to(device) for x in scattered_pages(rows, 6))
    part = [Segment(0, 2, 0, 94), Segment(2, 1, 1, 0), Segment(3, 1, 2, 39)]
    segments = Segments.of(part, device)
    given = q[:4].to(device), pool, tables, segments
    wanted, wanted_lse = dense_mla(*given, row_format=plain(q, VALUE), scale=SCALE)
    pool[int(tables[1, 0])] = torch.nan
    for empty in ([0, 2], [0, 1, 2, 3]):
        segments.visible[empty] = 0
        out, lse = dense_mla(*given, row_format=plain(q, VALUE), scale=SCALE)
        others = [row for row in range(4) if row not in empty]
        assert not out[empty].any() and bool((lse[empty] == -torch.inf).all())
        torch.testing.assert_close(out[others], wanted[others])
        torch.testing.assert_close(lse[others], wanted_lse[others])


def test_types(dtype: torch.dtype, bound: float, scattered_pages: Scatter, device: str, relative_error: Error) -> None:
    q, rows = problem(dtype)
    pool, tables = (x.to(device) for x in scattered_pages(rows, 8))
    out, lse = dense_mla(
        q.to(device), pool, tables, Segments.of(SEGMENTS, device), row_format=plain(q, VALUE), scale=SCALE
    )
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)
    assert relative_error(out, naive(q, rows)[0]) < bound


@pytest.mark.parametrize("heads", [128, 64], ids=["DeepSeek-V3", "GLM-5"])
def test_sizes_of_the_models(
    heads: int, dtype: torch.dtype, bound: float, scattered_pages: Scatter, device: str, relative_error: Error
) -> None:
    """A token and a draft of one sequence, one of another."""
    scale = (128 + 64) ** -0.5
    q, rows = problem(dtype, heads, 576)
    part = [Segment(0, 2, 0, 70), Segment(2, 1, 2, 39)]
    pool, tables = (x.to(device) for x in scattered_pages(rows, 64))
    segments = Segments.of(part, device)
    out, lse = dense_mla(q[:3].to(device), pool, tables, segments, row_format=plain(q, 512), scale=scale)
    expected, expected_lse = naive(q[:3], rows, part, 512, scale)
    assert relative_error(out, expected) < bound
    torch.testing.assert_close(lse.double().cpu(), expected_lse, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("heads, rank, rope", [(5, 128, 8), (64, 512, 64)])
def test_fp8_rows(
    heads: int, rank: int, rope: int, dtype: torch.dtype, bound: float, device: str, relative_error: Error
) -> None:
    """Against the numbers in the packed rows; rows beyond the sequences hold NaN in every part."""
    width, page_size, scale = rank + rope, 16, rank**-0.5
    q, rows = problem(dtype, heads, width)
    row_format = latent_format(rank, rope, FP8)
    pool = torch.full((20, page_size, row_format.columns), 255, dtype=torch.uint8)
    tables = torch.randperm(20, generator=torch.Generator().manual_seed(0))[:18].view(2, 9).int()
    numbers = []
    for table, values in zip(tables, (rows[0], rows[2])):
        packed = row_format.pack(values.float())
        for i, row in enumerate(packed):
            pool[table[i // page_size], i % page_size] = row
        numbers.append(row_format.unpack(packed).to(dtype))
    part = [Segment(0, 2, 0, 50), Segment(2, 1, 1, 39)]
    segments = Segments.of(part, device)
    out, lse = dense_mla(
        q[:3].to(device),
        pool.to(device),
        tables.to(device),
        segments,
        row_format=row_format,
        scale=scale,
    )
    expected, expected_lse = naive(q[:3], numbers, part, rank, scale)
    assert out.dtype == dtype
    assert relative_error(out, expected) < bound
    assert relative_error(lse, expected_lse) < bound


def test_pages_beyond_two_to_the_31_elements(device: str) -> None:
    """Only the pages that are touched take memory on a CPU."""
    need_memory(device, 12 << 30)
    width, page_size, count = 40, 64, 70
    pages = (1 << 31) // (width * page_size) + 2
    pool = torch.empty(pages, page_size, width, dtype=torch.float16, device=device)
    g = torch.Generator().manual_seed(0)
    rows = torch.randn(2 * page_size, width, generator=g).half()
    tables = torch.tensor([[pages - 1, pages // 2]], dtype=torch.int32, device=device)
    pool[pages - 1], pool[pages // 2] = rows[:page_size].to(device), rows[page_size:].to(device)
    q = torch.randn(1, 4, width, generator=g).half()
    part = [Segment(0, 1, 0, count - 1)]
    out, lse = dense_mla(q.to(device), pool, tables, Segments.of(part, device), row_format=plain(q, 32), scale=SCALE)
    expected, expected_lse = naive(q, [rows], part, 32)
    torch.testing.assert_close(out.double().cpu(), expected, rtol=1e-2, atol=2e-3)
    torch.testing.assert_close(lse.double().cpu(), expected_lse, rtol=1e-3, atol=1e-3)


def test_no_tokens(scattered_pages: Scatter, device: str) -> None:
    q, rows = problem()
    pool, tables = (x.to(device) for x in scattered_pages(rows, 8))
    out, lse = dense_mla(
        q[:0].to(device), pool, tables, Segments.of([], device), row_format=plain(q, VALUE), scale=SCALE
    )
    assert out.shape == (0, HEADS, VALUE) and lse.shape == (0, HEADS)


@pytest.mark.skipif(INTERPRETED, reason="the kernel allocates results only; 2,000 queries are too many to interpret")
def test_memory_stays_within_the_workspace(peak_memory: Callable[..., int]) -> None:
    """Scores of all 2,000 queries would take 64 MB a head."""
    count, start, workspace = 2000, 6000, 8 << 20
    q, pool = torch.randn(count, 4, WIDTH), torch.randn(125, 64, WIDTH)
    tables = torch.arange(125, dtype=torch.int32)[None]
    segments = [Segment(0, count, 0, start)]

    def run() -> object:
        return dense_mla(
            q, pool, tables, Segments.of(segments), row_format=plain(q, VALUE), scale=SCALE, workspace=workspace
        )

    results = count * 4 * (VALUE + 1) * 4
    rows = pool.numel() * 4
    assert peak_memory(run) < workspace + results + rows + (1 << 20)


@pytest.mark.skipif(INTERPRETED or cpu.library() is None, reason="of the C++ kernel, whose threads gather rows")
@pytest.mark.parametrize("fp8", [False, True])
def test_memory_of_the_threads_stays_within_the_workspace(
    fp8: bool, peak_memory: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under batch_invariant each thread gathers a whole context, here 3 MB."""
    workspace, dtype = 12 << 20, FP8 if fp8 else torch.float32
    row_format = latent_format(128, 64, dtype)
    q, pool = torch.randn(40, 2, 192), torch.randn(64, 64, 192)
    pool = row_format.pack(pool)
    tables, segments = torch.arange(64, dtype=torch.int32)[None], Segments.of([Segment(0, 40, 0, 4056)])

    def run() -> object:
        with batch_invariance(True):
            return dense_mla(q, pool, tables, segments, row_format=row_format, scale=SCALE, workspace=workspace)

    wanted = run()
    monkeypatch.setattr(cpu, "threads_for", lambda work: 64)
    assert peak_memory(run) < workspace + (1 << 20)
    assert all(map(torch.equal, run(), wanted))
