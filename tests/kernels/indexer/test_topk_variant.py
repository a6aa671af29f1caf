"""Variants in `scripts/kernel_bench/variants`: the selection that begins at a floor against a sort in plain Python, the
prolog in one launch against its definition in float64."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from dsa_engine.kernels.formats.cache_format import FP8
from dsa_engine.kernels.rows.segment import Segment, Segments
from dsa_engine.kernels.runtime.launch import INTERPRETED
from kernel_cases.inputs import PAGE_SIZE
from variants.prolog import prolog
from variants.topk import KEYS, MINUS_INF, scores_and_topk

pytestmark = pytest.mark.skipif(not INTERPRETED and not torch.cuda.is_available(), reason="needs the kernel to run")

NAN, INF = math.nan, math.inf
K, SPAN, ROOM, WIDTH = 20, 64, 64, 300
NORMAL = torch.randn(WIDTH, generator=torch.Generator().manual_seed(0))
CHANCE = torch.rand(WIDTH, generator=torch.Generator().manual_seed(1))
ROWS = {
    "random": NORMAL,
    "no whole span": NORMAL[:277],
    "negative": -NORMAL.abs(),
    "few levels": (2 * NORMAL).round(),
    "equal": torch.full((WIDTH,), -0.25),
    "zeros of both signs": torch.where(CHANCE < 0.5, 0.0, -0.0),
    "some NaN": torch.where(CHANCE < 0.03, NAN, torch.where(CHANCE < 0.05, -NAN, NORMAL)),
    "only NaN": torch.full((WIDTH,), NAN),
    "mostly -inf": torch.where(CHANCE < 0.04, NORMAL, -INF),
    "only -inf": torch.full((WIDTH,), -INF),
    "infinities": torch.where(CHANCE < 0.2, INF, torch.where(CHANCE < 0.5, -INF, NORMAL)),
    "less than k": NORMAL[:7],
    "all have room": NORMAL[:45],
    "one": NORMAL[:1],
    "all in one span": torch.where(torch.arange(WIDTH) // 30 == 5, NORMAL + 9, NORMAL),
}


def key(score: float) -> int:
    if math.isnan(score):
        return 0x7F800001
    bits = int(torch.tensor(score + 0.0).view(torch.int32))
    return bits ^ (bits >> 31 & 0x7FFFFFFF)


# The floor of a row, given its scores, the best first.
FLOORS: dict[str, Callable[[list[float]], float]] = {
    "a little below the k-th": lambda best: best[min(K + 3, len(best) - 1)],
    "above the k-th": lambda best: best[min(K - 3, len(best) - 1)],
    "the k-th": lambda best: best[min(K - 1, len(best) - 1)],
    "too low": lambda best: best[-1] if best[-1] > -INF else -3e38,
    "none": lambda best: -INF,
    "NaN": lambda best: NAN,
}


def test_the_last_floor(device: str) -> None:
    """A row each: the same slots with every floor; floors for the next step; counters as they were. A key's scale is
    its score, as one head's product is 1 and those of the others 0."""
    cases = [(name, row, floor) for name, row in ROWS.items() for floor in FLOORS]
    if INTERPRETED:  # each row with some of the floors; the first two with all
        cases = [
            case for i, case in enumerate(cases) if i < 2 * len(FLOORS) or i % 4 == 0 or case[0] == "all have room"
        ]
    best = [sorted(row.tolist(), key=lambda score: -key(score)) for _, row, _ in cases]
    floors = torch.tensor([key(FLOORS[floor](its)) for (*_, floor), its in zip(cases, best, strict=True)])
    pages = WIDTH // PAGE_SIZE + 1
    tables = torch.randperm(len(cases) * pages, generator=torch.Generator().manual_seed(2)).int().view(-1, pages)
    pool = KEYS.empty_pool(len(cases) * pages, PAGE_SIZE, torch.device("cpu")).zero_()
    keys, scales = KEYS.views(pool)
    assert scales is not None
    keys.view(FP8)[..., 0] = 1.0
    for (_, row, _), table in zip(cases, tables, strict=True):
        at = torch.arange(len(row))
        scales[table[at // PAGE_SIZE], at % PAGE_SIZE] = row
    q, weights = torch.zeros(len(cases), 64, 128, dtype=FP8), torch.zeros(len(cases), 64)
    q.view(torch.uint8)[:, 5, 0], weights[:, 5] = 0x38, 1.0  # 1.0 in e4m3
    segments = Segments.of([Segment(i, 1, i, len(row) - 1) for i, (_, row, _) in enumerate(cases)], device)
    finished = torch.zeros(len(cases), dtype=torch.int32, device=device)
    given = [t.to(device) for t in (q, weights, pool, tables)]
    slots, lowered = scores_and_topk(*given, segments, K, finished, floors.int().to(device), SPAN, ROOM)
    for case, table, its, got, floor in zip(cases, tables, best, slots.tolist(), lowered.tolist(), strict=True):
        row = case[1].tolist()
        order = sorted((i for i, s in enumerate(row) if s != -INF), key=lambda i: (-key(row[i]), i))[:K]
        wanted = [int(table[i // PAGE_SIZE]) * PAGE_SIZE + i % PAGE_SIZE for i in sorted(order)]
        assert (case[0], case[2], got) == (case[0], case[2], wanted + [-1] * (K - len(order)))
        least, most = key(its[K - 1]) if len(its) >= K else None, key(its[0])
        if len(order) < K or least is None:
            assert floor == MINUS_INF.value
        else:
            assert least - (most - least) / 32 - 2 <= floor <= max(least - (most - least) / 32 + 2, MINUS_INF.value)
    assert (finished == 0).all()


@pytest.mark.parametrize("rows", [1, 3])
def test_prolog(rows: int, device: str, relative_error: Callable[[torch.Tensor, torch.Tensor], float]) -> None:
    """Two parts of the inner dimension, the second tile of columns not whole; a block of zeros; twice, as counters stay
    zeros."""
    g = torch.Generator().manual_seed(rows)
    x, residual, norm_weight = (torch.randn(n, 512, generator=g).bfloat16() for n in (rows, rows, 1))
    residual[0, 128:256] = -x[0, 128:256]
    weight = torch.randn(200, 512, generator=g).to(torch.float8_e4m3fn)
    scale, finished = torch.rand(2, 4, generator=g), torch.zeros(2, dtype=torch.int32)
    given = [t.to(device) for t in (x, residual, norm_weight[0], weight, scale, finished)]
    for _ in range(2):
        out, normed, summed = (t.cpu() for t in prolog(*given, 256))
    assert torch.equal(summed, x + residual) and not given[-1].any()
    full = summed.double()
    wanted = full * (full.square().mean(dim=1, keepdim=True) + 1e-6).rsqrt() * norm_weight.double()
    assert relative_error(normed, wanted) < 5e-3
    blocks = normed.double().view(rows, 4, 128)
    of_block = torch.exp2((blocks.abs().amax(dim=2, keepdim=True).clamp(min=1e-4) / 448).log2().ceil())
    codes = (blocks / of_block).float().to(torch.float8_e4m3fn).double() * of_block
    expanded = scale.repeat_interleave(128, 0)[:200].repeat_interleave(128, 1).double() * weight.double()
    assert relative_error(out, codes.view(rows, 512) @ expanded.T) < 3e-3
