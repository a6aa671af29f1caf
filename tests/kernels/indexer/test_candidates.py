"""A selection over pages that lie on several ranks, against one over all; the steps by themselves against sorting."""

from __future__ import annotations

import math

import pytest
import torch

from dsa_engine.kernels.formats.cache_format import FP8, index_key_format
from dsa_engine.kernels.indexer import nth_largest as nth_largest_file
from dsa_engine.kernels.indexer import slots_above as slots_above_file
from dsa_engine.kernels.indexer._candidates import NONE
from dsa_engine.kernels.indexer.lightning_indexer import lightning_indexer
from dsa_engine.kernels.indexer.nth_largest import nth_largest
from dsa_engine.kernels.indexer.slots_above import slots_above
from dsa_engine.kernels.indexer.topk import Config, Spans, select_by_kernel, select_by_spans, select_topk
from dsa_engine.kernels.rows.segment import Paging, Segment, Segments, local_visible
from dsa_engine.kernels.runtime.launch import INTERPRETED

NO_PAGE, PAGE = 2**25, 8
NAN, INF = math.nan, math.inf


def unpack_candidates(keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores, float32, and positions, int64, of candidate keys; zeros for NONE."""
    order, some = (keys >> 32).int(), keys != NONE
    scores = (order ^ ((order >> 31) & 0x7FFFFFFF)).view(torch.float32)
    return scores.masked_fill(~some, 0.0), (0xFFFFFFFF - (keys & 0xFFFFFFFF)) * some


def divided(pages: list[int], parts: int, g: torch.Generator) -> list[tuple[torch.Tensor, torch.Tensor, int]]:
    """Of each rank: block tables and page indices ``[sequences, local pages]``, and pages of its pool. In turn from any
    rank on, but for a page here and there that goes elsewhere; one page more than any sequence has there."""
    owners = []
    for count in pages:
        owner = (torch.arange(count) + int(torch.randint(parts, (1,), generator=g))) % parts
        astray = torch.rand(count, generator=g) < 0.2
        owners.append(torch.where(astray, torch.randint(parts, (count,), generator=g), owner))
    result = []
    for part in range(parts):
        mine = [(owner == part).nonzero().flatten() for owner in owners]
        width, total = 1 + max(map(len, mine)), sum(map(len, mine))
        numbers = torch.randperm(total + 1, generator=g).int().split([*map(len, mine), 1])
        tables, index = torch.zeros(len(pages), width).int(), torch.full((len(pages), width), NO_PAGE).int()
        for i, at in enumerate(mine):
            tables[i, : len(at)], index[i, : len(at)] = numbers[i], at
        result.append((tables, index, total + 1))
    return result


# Positions of rows by sequence: drafts before, at and behind a border of pages; the last one is padding.
LENGTHS = (211, 60, 3)
ROWS = {
    1: [[210], [59], [2]],
    2: [[207, 208], [58, 59], [2, -1]],
    4: [[205, 206, 207, 208], [0, 1, 2, 3], [1, 2, -1, -1]],
}


@pytest.mark.usefixtures("on_a_cpu")
@pytest.mark.parametrize("dtype", [torch.float32, FP8], ids=["plain", "FP8"])
@pytest.mark.parametrize("parts", [1, 2, 3, 8])
@pytest.mark.parametrize("each", ROWS)
def test_a_selection_on_several_ranks_is_that_of_one(each: int, parts: int, dtype: torch.dtype, device: str) -> None:
    """Scores are small whole numbers, so that many tie; k is more than a rank has, or fewer."""
    if INTERPRETED and (parts, dtype) != (3, torch.float32):
        pytest.skip("the selection takes long in the interpreter")
    heads, dim, k = 2, 8, 24
    g = torch.Generator().manual_seed(each + parts)
    key_format = index_key_format(dim, dtype, power_of_two=True)
    row_bytes = torch.randint(-2, 3, (sum(LENGTHS), dim), generator=g).float()
    keys_of = row_bytes.split(LENGTHS)
    positions = torch.tensor(sum(ROWS[each], []))
    q = torch.randint(-2, 3, (len(positions), heads, dim), generator=g).float()
    weights = torch.randint(-2, 3, (len(positions), heads), generator=g).float()
    sequences = torch.arange(len(LENGTHS)).repeat_interleave(each)
    all_keys, all_slots, pages_at = [], [], []
    for tables, index, pages in divided([-(-n // PAGE) for n in LENGTHS], parts, g):
        plain = torch.full((pages, PAGE, dim), 5.0)  # what no row may see
        for i, keys in enumerate(keys_of):
            padded = torch.cat((keys, torch.full((-len(keys) % PAGE, dim), 5.0))).view(-1, PAGE, dim)
            known = index[i] < NO_PAGE
            plain[tables[i, known].long()] = padded[index[i, known].long()]
        pool = plain if dtype == torch.float32 else key_format.pack(plain)
        width = tables.shape[1] * PAGE
        segments = Segments.of([Segment(i * each, each, i, width - each) for i in range(len(LENGTHS))], device)
        segments.visible.copy_(local_visible(positions, index, sequences.int(), PAGE))
        result = torch.zeros(len(positions), k, dtype=torch.int64, device=device)
        queries = q if dtype == torch.float32 else q.to(dtype)
        given = (x.to(device) for x in (queries, weights, pool, tables))
        how = {"key_format": key_format, "page_index": index.to(device), "keys": result}
        all_slots.append(lightning_indexer(*given, segments, k, **how))
        all_keys.append(result)
        pages_at.append({int(page): int(at) for page, at in zip(tables.flatten(), index.flatten()) if at < NO_PAGE})
    thresholds = nth_largest(torch.stack(all_keys), k)
    chosen: list[list[int]] = [[] for _ in positions]
    for keys, slots, at in zip(all_keys, all_slots, pages_at, strict=True):
        for row, line in enumerate(slots_above(keys, slots, thresholds).tolist()):
            assert line.count(-1) == k - len([slot for slot in line if slot >= 0])
            chosen[row] += [at[slot // PAGE] * PAGE + slot % PAGE for slot in line if slot >= 0]
    for row, position in enumerate(positions.tolist()):
        seen = keys_of[int(sequences[row])][: position + 1]
        scores = (weights[row] @ (q[row] @ seen.T).clamp(min=0)).tolist()
        best = sorted(range(position + 1), key=lambda s: (-scores[s], s))[:k]
        assert sorted(chosen[row]) == sorted(best), (row, position)


@pytest.mark.parametrize("way", ["spans", "rows", "reference"])
def test_keys_are_in_the_order_of_scores_and_positions(way: str, device: str) -> None:
    if way != "reference" and not INTERPRETED and device == "cpu":
        pytest.skip("needs the kernel to run")
    g, width, k, page_size = torch.Generator().manual_seed(0), 300, 70, 16
    scores = torch.tensor([-INF, -2.5, -0.0, 0.0, 1e-40, 3.0, INF, NAN, -NAN])[
        torch.randint(9, (4, width), generator=g)
    ]
    scores[2, 60:] = -INF
    lengths = torch.tensor([300, 299, 300, 0], dtype=torch.int32)
    tables, index = torch.randperm(38, generator=g).int().view(2, 19), (torch.arange(38) * 7 + 2).int().view(2, 19)
    paging = Paging(tables.to(device), torch.tensor([1, 0, 1, 0], dtype=torch.int32, device=device), page_size)
    keys = torch.empty(4, k, dtype=torch.int64, device=device)
    given = scores.clone().to(device), k, lengths.to(device)
    how = {"page_index": index.to(device), "keys": keys}
    if way == "reference":
        slots, _ = select_topk(*given, paging=paging, **how)
    elif way == "spans":
        slots, _ = select_by_spans(*given, Spans(64, 32, 1), paging, **how)
    else:
        config = Config(warps=1, groups=2, piece=64, capacity=192, sample=0, resident=1, registers=128)
        slots, _ = select_by_kernel(*given, config, paging, **how)
    decoded, positions = unpack_candidates(keys.cpu())
    for row in range(4):
        sequence = 1 - row % 2
        number = {int(page): i for i, page in enumerate(tables[sequence])}
        count = int((slots[row] >= 0).sum())
        assert (keys[row, count:] == NONE).all() and (slots[row, count:] == -1).all()
        for at in range(count):
            slot = int(slots[row, at])
            column = number[slot // page_size] * page_size + slot % page_size
            assert (
                positions[row, at] == (7 * (19 * sequence + column // page_size) + 2) * page_size + column % page_size
            )
            score = float(scores[row, column])
            assert decoded[row, at].item() == score or (math.isnan(score) and decoded[row, at].isnan())
        line = list(zip(decoded[row, :count].tolist(), positions[row, :count].tolist(), keys[row, :count].tolist()))
        line.sort(key=lambda each: (each[0] == each[0], -each[0] if each[0] == each[0] else 0.0, each[1]))
        assert [key for *_, key in line] == sorted((key for *_, key in line), reverse=True)


@pytest.mark.parametrize("held", [nth_largest_file._HELD, 64], ids=["in registers", "read again"])
@pytest.mark.parametrize("parts, each, k", [(1, 40, 7), (3, 50, 20), (8, 24, 24), (4, 16, 70), (2, 8, 17), (1, 1, 1)])
def test_nth_largest(parts: int, each: int, k: int, held: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nth_largest_file, "_HELD", held)
    g, rows = torch.Generator().manual_seed(k), 5
    keys = torch.randint(-(2**63), 2**63 - 1, (parts, rows, each), generator=g)
    keys[:, 1] = torch.randperm(parts * each, generator=g).view(parts, each) - 3  # neighbours
    keys[:, 2, each // 2 :] = keys[:, 3] = NONE
    keys[0, 4, 0] = 2**63 - 1
    result = nth_largest(keys.to(device), k).tolist()
    for row in range(rows):
        line = sorted(keys[:, row].flatten().tolist(), reverse=True)
        assert result[row] == (line[k - 1] if k <= len(line) else NONE)


def test_slots_above(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = torch.tensor([[3, NONE, 5, 4], [NONE, 7, NONE, 6]], device=device)
    slots = torch.tensor([[9, -1, 1, 0], [-1, 2, -1, 8]], dtype=torch.int32, device=device)
    assert slots_above(keys, slots, torch.tensor([4, NONE], device=device)).tolist() == [[1, 0, -1, -1], [2, 8, -1, -1]]
    monkeypatch.setattr(slots_above_file, "_COLUMNS", 64)
    g = torch.Generator().manual_seed(0)
    keys, slots = torch.randint(-99, 99, (3, 200), generator=g), torch.arange(600).int().view(3, 200)
    out = slots_above(keys.to(device), slots.to(device), torch.tensor([0, -99, 100], device=device))
    for line, key, slot, least in zip(out.tolist(), keys, slots, (0, -99, 100), strict=True):
        chosen = slot[key >= least].tolist()
        assert line == chosen + [-1] * (200 - len(chosen))
    assert slots_above(keys[:0], slots[:0], keys[:0, 0]).shape == (0, 200)


def test_local_tokens_are_counted() -> None:
    g, pages = torch.Generator().manual_seed(0), [9, 1, 4]
    positions = torch.tensor([9 * PAGE - 1, 20, 8, 7, 0, -1, 5, 3 * PAGE + 2])
    sequences = torch.tensor([0, 0, 0, 0, 0, 1, 1, 2]).int()
    totals = torch.zeros(8, dtype=torch.int32)
    for _, index, _ in divided(pages, 3, g):
        seen = local_visible(positions.int(), index, sequences, PAGE)
        for row, (position, sequence) in enumerate(zip(positions.tolist(), sequences.tolist(), strict=True)):
            tokens = (at * PAGE + offset for at in index[sequence].tolist() for offset in range(PAGE))
            assert seen[row] == sum(token <= position for token in tokens)
        totals += seen
    assert totals.tolist() == (positions + 1).tolist()
    far = torch.tensor([[16_000, NO_PAGE]], dtype=torch.int32)
    assert local_visible(torch.tensor([2**20 - 1]), far, sequences[:1], 64).tolist() == [64]
