"""Sparse attention against a softmax over lists, in float64."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import triton
import triton.language as tl

from caches import need_memory
from dsa_engine.kernels.attention import _online_softmax as online_softmax
from dsa_engine.kernels.attention._online_softmax import load_queries, store_results
from dsa_engine.kernels.attention.sparse_attention import sparse_attention
from dsa_engine.kernels.formats.cache_format import FP8, latent_format
from dsa_engine.kernels.formats.row_format import LatentFormat
from dsa_engine.kernels.runtime.launch import INTERPRETED, runs_triton

pytestmark = pytest.mark.usefixtures("on_a_cpu")

Error = Callable[[torch.Tensor, torch.Tensor], float]
SCALE = 0.37


def plain(q: torch.Tensor, rank: int) -> LatentFormat:
    """The format of plain rows as wide as q."""
    return latent_format(rank, q.shape[-1] - rank, q.dtype)


def naive(
    q: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor, value_dim: int, scale: float = SCALE
) -> tuple[torch.Tensor, torch.Tensor]:
    """``rows [R, width]``."""
    q, rows, slots = q.double().cpu(), rows.double().cpu(), slots.cpu()
    out = torch.zeros(q.shape[0], q.shape[1], value_dim, dtype=torch.float64)
    lse = torch.full(q.shape[:2], -math.inf, dtype=torch.float64)
    for t, chosen in enumerate(slots.tolist()):
        chosen_rows = rows[[s for s in chosen if s >= 0]]
        for h in range(q.shape[1] if len(chosen_rows) else 0):
            scores = chosen_rows @ q[t, h] * scale
            lse[t, h] = scores.exp().sum().log()
            out[t, h] = (scores.exp()[:, None] * chosen_rows[:, :value_dim]).sum(0) / scores.exp().sum()
    return out, lse


def problem(
    tokens: int, heads: int, width: int, k: int, seed: int = 0, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> list[torch.Tensor]:
    """Slots in no order, −1 scattered among them, the second token without any."""
    g = torch.Generator().manual_seed(seed)
    q, pool = torch.randn(tokens, heads, width, generator=g), torch.randn(9, 13, width, generator=g)
    slots = torch.stack([torch.randperm(9 * 13, generator=g)[:k] for _ in range(tokens)]).int()
    slots[torch.rand(slots.shape, generator=g) < 0.2] = -1
    slots[1:2] = -1
    return [q.to(device, dtype), pool.to(device, dtype), slots.to(device)]


@pytest.mark.parametrize("workspace", [1, 30_000, 256 << 20])
@pytest.mark.parametrize(
    "tokens, heads, width, value_dim, k",
    [
        (1, 1, 4, 4, 1),
        (2, 21, 40, 32, 20),
        (1, 5, 40, 32, 100),
        (17, 3, 24, 16, 33),
        (9, 8, 12, 12, 64),
        (3, 7, 10, 3, 117),
    ],
)
def test_against_lists(
    tokens: int, heads: int, width: int, value_dim: int, k: int, workspace: int, device: str
) -> None:
    q, pool, slots = problem(tokens, heads, width, k, device=device)
    out, lse = sparse_attention(q, pool, slots, row_format=plain(q, value_dim), scale=SCALE, workspace=workspace)
    expected, expected_lse = naive(q, pool.view(-1, width), slots, value_dim)
    assert (out.dtype, lse.dtype) == (torch.float32, torch.float32)
    torch.testing.assert_close(out.double().cpu(), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(lse.double().cpu(), expected_lse, rtol=1e-5, atol=1e-5)
    if tokens > 1:
        assert not out[1].any() and bool((lse[1] == -math.inf).all())


@pytest.mark.parametrize("heads", [128, 64], ids=["DeepSeek-V3.2", "GLM-5"])
def test_sizes_of_the_models(heads: int, dtype: torch.dtype, bound: float, device: str, relative_error: Error) -> None:
    scale = (128 + 64) ** -0.5
    q, pool, slots = problem(2, heads, 576, 101, device=device, dtype=dtype)
    slots[1] = torch.arange(101, device=device)
    out, lse = sparse_attention(q, pool, slots, row_format=plain(q, 512), scale=scale)
    expected, expected_lse = naive(q, pool.view(-1, 576), slots, 512, scale)
    assert out.dtype == dtype
    assert relative_error(out, expected) < bound
    torch.testing.assert_close(lse.double().cpu(), expected_lse, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("splits", [1, 2, 5, 16])
def test_splits_change_nothing(splits: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any number of splits gives the same result; 16 are more than there are steps, so that some have no rows."""
    monkeypatch.setattr(online_softmax, "choose_splits", lambda *_: splits)
    q, pool, slots = problem(3, 5, 40, 90, device=device)
    slots[2, :70] = -1  # all that the first splits see
    out, lse = sparse_attention(q, pool, slots, row_format=plain(q, 32), scale=SCALE)
    expected, expected_lse = naive(q, pool.view(-1, 40), slots, 32)
    torch.testing.assert_close(out.double().cpu(), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(lse.double().cpu(), expected_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("pattern", ["leading", "trailing", "alternating", "a block", "all but one", "none"])
def test_missing_slots(pattern: str, device: str) -> None:
    """−1 at any index, also over whole steps, the first above all; the rows without a slot hold NaN."""
    q, pool, _ = problem(1, 4, 24, 1, device=device)
    slots = torch.arange(117, device=device).int()[None]
    missing = {
        "leading": slice(0, 80),
        "trailing": slice(50, None),
        "alternating": slice(0, None, 2),
        "a block": slice(16, 32),
        "all but one": slice(0, 116),
        "none": slice(0, 0),
    }[pattern]
    pool.view(-1, 24)[slots[0, missing].long()] = math.nan
    slots[:, missing] = -1
    out, lse = sparse_attention(q, pool, slots, row_format=plain(q, 16), scale=SCALE)
    expected, expected_lse = naive(q, pool.view(-1, 24), slots, 16)
    torch.testing.assert_close(out.double().cpu(), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(lse.double().cpu(), expected_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("splits", [1, 3])
def test_counts(splits: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots after the count may be anything: rows that hold NaN, or that do not exist."""
    monkeypatch.setattr(online_softmax, "choose_splits", lambda *_: splits)
    q, pool, slots = problem(6, 3, 24, 60, device=device)
    counts = torch.tensor([60, 7, 0, 1, 33, 16], dtype=torch.int32, device=device)
    wanted, junk = slots.clone(), slots.clone()
    for t, count in enumerate(counts.tolist()):
        wanted[t, count:] = -1
        junk[t, count:] = 2_000_000_000
    wanted[wanted == 5] = junk[junk == 5] = -1
    junk[4, 40:] = 5
    pool.view(-1, 24)[5] = math.nan
    out, lse = sparse_attention(q, pool, junk, row_format=plain(q, 16), scale=SCALE, counts=counts)
    expected, expected_lse = naive(q, pool.view(-1, 24), wanted, 16)
    torch.testing.assert_close(out.double().cpu(), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(lse.double().cpu(), expected_lse, rtol=1e-5, atol=1e-5)
    assert bool((lse[2] == -math.inf).all()) and not out[2].any()


@pytest.mark.parametrize("filler", [1e30, math.nan])
def test_unread_rows_do_not_matter(filler: float, device: str) -> None:
    """Rows without a slot, row 0 above all, have no influence, however large their numbers."""
    q, pool, slots = problem(5, 3, 8, 20, device=device)
    slots[slots == 0] = -1
    read = torch.zeros(9 * 13, dtype=torch.bool, device=device)
    read[slots[slots >= 0].long()] = True
    out, lse = sparse_attention(q, pool, slots, row_format=plain(q, 6), scale=SCALE)
    pool.view(-1, 8)[~read] = filler
    again, lse_again = sparse_attention(q, pool, slots, row_format=plain(q, 6), scale=SCALE)
    assert torch.equal(out, again) and torch.equal(lse, lse_again)


def test_large_scores_do_not_overflow(device: str) -> None:
    q, pool, slots = problem(4, 2, 8, 20, device=device)
    out, lse = sparse_attention(q * 1e3, pool, slots, row_format=plain(q, 8), scale=1.0)
    assert bool(torch.isfinite(out).all()) and bool(torch.isfinite(lse[[0, 2, 3]]).all())


@pytest.mark.parametrize("heads, width, value_dim", [(4, 24, 16), (9, 48, 48), (16, 40, 32)])
def test_types(
    heads: int, width: int, value_dim: int, dtype: torch.dtype, bound: float, device: str, relative_error: Error
) -> None:
    q, pool, slots = problem(5, heads, width, 40, device=device, dtype=dtype)
    out, _ = sparse_attention(q, pool, slots, row_format=plain(q, value_dim), scale=SCALE)
    assert out.dtype == dtype
    assert relative_error(out, naive(q, pool.view(-1, width), slots, value_dim)[0]) < bound


@pytest.mark.parametrize(
    "heads, rank, rope, k", [(5, 128, 8, 40), (64, 512, 64, 40), (3, 384, 16, 19), (3, 256, 0, 50)]
)
def test_fp8_rows(
    heads: int, rank: int, rope: int, k: int, dtype: torch.dtype, bound: float, device: str, relative_error: Error
) -> None:
    """Against the numbers in the packed rows; rows without a slot hold NaN in every part."""
    width = rank + rope
    q, rows, slots = problem(3, heads, width, k, dtype=dtype)
    row_format = latent_format(rank, rope, FP8)
    packed = row_format.pack(rows.view(-1, width).float() * torch.rand(9 * 13, 1))
    packed[:, :8] = torch.tensor([0, 1, 7, 8, 128, 129, 126, 254], dtype=torch.uint8)  # zeros, subnormals, ±448
    numbers = row_format.unpack(packed).to(dtype)
    read = torch.zeros(9 * 13, dtype=torch.bool)
    read[slots[slots >= 0].long()] = True
    packed[~read] = 255
    pool = packed.view(9, 13, -1).to(device)
    scale = rank**-0.5
    out, lse = sparse_attention(q.to(device), pool, slots.to(device), row_format=row_format, scale=scale)
    expected, expected_lse = naive(q, numbers, slots, rank, scale)
    assert out.dtype == dtype
    assert relative_error(out, expected) < bound
    assert relative_error(lse[[0, 2]], expected_lse[[0, 2]]) < bound
    assert bool((lse[1] == -math.inf).all())


def test_slots_beyond_two_to_the_31_elements(device: str) -> None:
    """Only the pages that are touched take memory on a CPU."""
    need_memory(device, 12 << 30)
    width, page_size = 40, 64
    pages = (1 << 31) // (width * page_size) + 2
    pool = torch.empty(pages, page_size, width, dtype=torch.float16, device=device)
    flat = pool.view(-1, width)
    slots = torch.tensor([[0, flat.shape[0] - 1, flat.shape[0] // 2, -1, flat.shape[0] - 70]], device=device).int()
    g = torch.Generator().manual_seed(0)
    known = torch.randn(5, width, generator=g).to(device, torch.float16)
    for s, row in zip(slots[0].tolist(), known):
        if s >= 0:
            flat[s] = row
    q = torch.randn(1, 4, width, generator=g).to(device, torch.float16)
    out, lse = sparse_attention(q, pool, slots, row_format=plain(q, 32), scale=SCALE)
    expected, expected_lse = naive(q, known, torch.tensor([[0, 1, 2, -1, 4]]), 32)
    torch.testing.assert_close(out.double().cpu(), expected, rtol=1e-2, atol=1e-3)
    torch.testing.assert_close(lse.double().cpu(), expected_lse, rtol=1e-3, atol=1e-3)


@triton.jit
def copy_last_token_kernel(
    q, out, lse, tokens, HEADS: tl.constexpr, VALUE: tl.constexpr, ROTATED: tl.constexpr, FORMAT: tl.constexpr
):
    token = tokens - 1 + tl.program_id(0).to(tl.int64)
    head = tl.arange(0, HEADS)
    value, _ = load_queries(q, token, head, HEADS, VALUE, ROTATED, VALUE, ROTATED, FORMAT)
    one = tl.full([HEADS], 1.0, tl.float32)
    store_results(out, lse, tokens, token, head, one, one, value.to(tl.float32), HEADS, VALUE, VALUE, FORMAT)


def test_tokens_beyond_two_to_the_31_elements(device: str) -> None:
    """Checks the addresses of queries and results only: the interpreter would take days for a grid of so many
    tokens."""
    need_memory(device, 20 << 30)
    if not runs_triton(torch.empty(0, device=device)):
        pytest.skip("the kernel's addresses: there is no kernel here")
    heads, value_dim, rope = 16, 32, 16
    tokens = (1 << 31) // (heads * value_dim) + 2
    q = torch.empty(tokens, heads, value_dim + rope, dtype=torch.float16, device=device)
    out = torch.empty(tokens, heads, value_dim, dtype=torch.float16, device=device)
    lse = torch.empty(tokens, heads, dtype=torch.float32, device=device)
    q[-1] = torch.randn(heads, value_dim + rope, generator=torch.Generator().manual_seed(0)).to(device, torch.float16)
    helpers = plain(q, value_dim).helpers
    copy_last_token_kernel[(1,)](q, out, lse, tokens, HEADS=heads, VALUE=value_dim, ROTATED=rope, FORMAT=helpers)
    assert torch.equal(out[-1], q[-1, :, :value_dim])
    torch.testing.assert_close(lse[-1], torch.full_like(lse[-1], math.log(2)))


def test_no_tokens_and_no_slots(device: str) -> None:
    q, pool, slots = problem(4, 5, 40, 10, device=device)
    out, lse = sparse_attention(q[:0], pool, slots[:0], row_format=plain(q, 32), scale=SCALE)
    assert out.shape == (0, 5, 32) and lse.shape == (0, 5)
    out, lse = sparse_attention(q, pool, slots[:, :0], row_format=plain(q, 32), scale=SCALE)
    assert not out.any() and bool((lse == -math.inf).all())


@pytest.mark.parametrize(
    "programs, steps, max_splits, expected",
    [(8192, 32, 64, 1), (264, 32, 64, 1), (16, 32, 64, 8), (2, 1, 64, 1), (2, 0, 64, 1), (2, 32, 0, 1)],
)
def test_number_of_splits(programs: int, steps: int, max_splits: int, expected: int) -> None:
    """On 132 multiprocessors: programs fill the chip, with no more parts than steps or than allowed."""
    assert online_softmax.choose_splits(programs, steps, 132, max_splits) == expected


def test_one_token_is_split_over_many_programs() -> None:
    assert 8 <= online_softmax.choose_splits(2, 32, 132, 64) <= 32
    assert 32 <= online_softmax.choose_splits(2, 2048, 132, 64) <= 64


@pytest.mark.skipif(INTERPRETED, reason="what the CPU's own kernel and the reference are given")
def test_slots_outside_of_the_pool_and_columns_apart(relative_error: Error) -> None:
    q, pool, slots = problem(4, 2, 8, 5)
    apart = pool.transpose(0, 2).contiguous().transpose(0, 2)[:, :1]
    slots = torch.where(slots < 0, slots, slots // 13)
    wanted = sparse_attention(q, apart.contiguous(), slots, row_format=plain(q, 8), scale=SCALE)[0]
    assert relative_error(sparse_attention(q, apart, slots, row_format=plain(q, 8), scale=SCALE)[0], wanted) < 1e-6
    slots[2, 3] = 9 * 13
    with pytest.raises(IndexError):
        sparse_attention(q, pool, slots, row_format=plain(q, 8), scale=SCALE)
