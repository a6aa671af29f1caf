"""The variant of top-k in `scripts/kernel_bench/variants`, which begins at a floor, against a sort in plain Python."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from dsa_engine.kernels.formats.cache_format import FP8
from dsa_engine.kernels.rows.segment import Segment, Segments
from dsa_engine.kernels.runtime.launch import INTERPRETED
from kernel_cases.inputs import PAGE_SIZE
from variants.topk import KEYS, MINUS_INF, scores_and_topk

KERNEL_ONLY = pytest.mark.skipif(not INTERPRETED and not torch.cuda.is_available(), reason="needs the kernel to run")

NAN, INF = math.nan, math.inf
# Of scores in the order of selection and k: a floor.
FLOORS: dict[str, Callable[[torch.Tensor, int], torch.Tensor]] = {
    "a little below the k-th": lambda best, k: best[: k + k // 8 + 1][-1],
    "above the k-th": lambda best, k: best[: k - 3][-1],
    "the k-th": lambda best, k: best[:k][-1],
    "too low": lambda best, k: best[-1].clamp(min=-3e38),
    "none": lambda best, k: torch.tensor(-INF),
    "NaN": lambda best, k: torch.tensor(NAN),
}


def rows_of(width: int, k: int, room: int) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    normal, chance = torch.randn(width, generator=g), torch.rand(width, generator=g)
    return {
        "random": normal,
        "no whole span": normal[:-23],
        "all have room": normal[: (k + room) // 2],
        "negative": -normal.abs(),
        "few levels": (2 * normal).round(),
        "equal": torch.full((width,), -0.25),
        "zeros of both signs": torch.where(chance < 0.5, 0.0, -0.0),
        "some NaN": torch.where(chance < 0.03, NAN, torch.where(chance < 0.05, -NAN, normal)),
        "only NaN": torch.full((width,), NAN),
        "mostly -inf": torch.where(chance < k / width / 2, normal, -INF),
        "only -inf": torch.full((width,), -INF),
        "infinities": torch.where(chance < 0.2, INF, torch.where(chance < 0.5, -INF, normal)),
        "less than k": normal[: k // 3],
        "one": normal[:1],
        "all in one span": torch.where(torch.arange(width) // (k + 10) == 5, normal + 9, normal),
    }


def keys_of(scores: torch.Tensor) -> torch.Tensor:
    """int64, in the order of the scores: NaN the greatest, zeros equal."""
    bits = (scores + 0.0).view(torch.int32)
    return torch.where(scores.isnan(), 0x7F800001, bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()


@KERNEL_ONLY
@pytest.mark.parametrize(
    "width, k, span, room",
    [(300, 20, 64, 64), pytest.param(131_072, 2048, 512, 4096, marks=pytest.mark.skipif(INTERPRETED, reason="long"))],
)
def test_the_last_floor(width: int, k: int, span: int, room: int, device: str) -> None:
    """A row each: the same slots with every floor; floors for the next step; counters as they were. A key's scale is
    its score, as one head's product is 1 and those of the others 0. The first three rows have every floor."""
    rows = rows_of(width, k, room)
    cases = [(name, row, floor) for name, row in rows.items() for floor in FLOORS]
    cases = [case for i, case in enumerate(cases) if i < 3 * len(FLOORS) or i % 4 == 0]
    order = [keys_of(row).sort(descending=True, stable=True).indices for _, row, _ in cases]
    best = [row[its] for (_, row, _), its in zip(cases, order, strict=True)]
    floors = torch.stack([FLOORS[floor](its, k) for (*_, floor), its in zip(cases, best, strict=True)])
    pages = width // PAGE_SIZE + 1
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
    slots, lowered = scores_and_topk(*given, segments, k, finished, keys_of(floors).int().to(device), span, room)
    for case, table, its, at, got, floor in zip(cases, tables, best, order, slots.cpu(), lowered.tolist(), strict=True):
        chosen = at[:k][its[:k] != -INF].sort().values
        wanted = torch.full((k,), -1)
        wanted[: len(chosen)] = table[chosen // PAGE_SIZE] * PAGE_SIZE + chosen % PAGE_SIZE
        assert torch.equal(got, wanted.int()), (case[0], case[2])
        lowest, highest = keys_of(its[:k][-1]).item(), keys_of(its[0]).item()
        lower = lowest - (highest - lowest) / 32 if len(chosen) == k else MINUS_INF.value
        assert abs(floor - lower) <= 2, (case[0], case[2])
    assert (finished == 0).all()
