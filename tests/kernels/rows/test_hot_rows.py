"""Hot rows: what is resolved, against dictionaries and rings written plainly, and what is fetched, by its contents."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

from dsa_engine.kernels.rows import resolve_rows as file
from dsa_engine.kernels.rows.fetch_rows import fetch_rows
from dsa_engine.kernels.rows.resolve_rows import COLUMNS, resolve_rows
from dsa_engine.kernels.runtime.launch import INTERPRETED

PAGES, PAGE, SPILLED, WIDTH = 5, 4, 12, 6  # resident pages, rows of a page, spilled pages, columns
LIMIT = PAGES * PAGE


class Model:
    """Sets of hot rows: a ring of spilled rows each, and where each row was put last."""

    def __init__(self, sets: int, hot_rows: int):
        self.rings: list[list[int | None]] = [[None] * hot_rows for _ in range(sets)]
        self.hands, self.where, self.hot_rows = [0] * sets, dict[int, int](), hot_rows

    def resolve(self, own: int, rows: list[list[int]]) -> tuple[list[list[int]], list[tuple[int, int]]]:
        """Resolved slots of the rows of a request, and what is fetched."""
        ring, fetched = self.rings[own], list[tuple[int, int]]()
        base = own * self.hot_rows
        of_set = range(base, base + self.hot_rows)
        used = {self.where[slot - LIMIT] for row in rows for slot in row if self.where.get(slot - LIMIT) in of_set}
        resolved = []
        for row in rows:
            resolved.append([*row])
            before = [self.where.get(slot - LIMIT) for slot in row]
            for i, slot in enumerate(row):
                if slot < LIMIT:
                    continue
                hot = before[i]
                if hot not in of_set:
                    while (hot := base + self.hands[own]) in used:
                        self.hands[own] = (self.hands[own] + 1) % self.hot_rows
                    self.hands[own] = (self.hands[own] + 1) % self.hot_rows
                    if (old := ring[hot - base]) is not None and self.where.get(old) == hot:
                        del self.where[old]
                    ring[hot - base], self.where[slot - LIMIT] = slot - LIMIT, hot
                    used.add(hot)
                    fetched.append((slot - LIMIT, LIMIT + hot))
                resolved[-1][i] = LIMIT + hot
        return resolved, fetched


class Tables:
    def __init__(self, sets: int, hot_rows: int, device: str):
        self.where = torch.full((SPILLED + 1, PAGE), -1, dtype=torch.int32, device=device)
        self.row_of = torch.full((sets + 1, hot_rows), -1, dtype=torch.int32, device=device)
        self.stamp = torch.zeros_like(self.row_of)
        self.of_set = torch.zeros(sets + 1, COLUMNS, dtype=torch.int64, device=device)
        pages = PAGES + -(-sets * hot_rows // PAGE)
        self.pool = torch.randint(1000, (pages, PAGE, WIDTH), dtype=torch.int16, device=device)
        self.host = torch.randint(1000, (SPILLED, PAGE, WIDTH), dtype=torch.int16)
        if device == "cuda":
            self.host = self.host.pin_memory()

    def resolve(self, rows: torch.Tensor, sets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return resolve_rows(rows, sets, self.where, self.row_of, self.stamp, self.of_set, LIMIT)

    def check(self) -> None:
        """Where a row is said to lie, it lies."""
        where = self.where[:-1].flatten()
        rows = (where >= 0).nonzero().flatten()
        assert torch.equal(self.row_of.flatten()[where[rows].long()].long(), rows)
        assert bool((self.where[-1] == -1).all()) and bool((self.row_of[-1] == -1).all())


def selections(rng: random.Random, each: int, k: int, pages: list[int]) -> list[list[int]]:
    """Slots of a request with these pages: all different, or mostly those of the row before; short ones end in −1."""
    slots = [page * PAGE + offset for page in pages for offset in range(PAGE)]
    if rng.random() < 0.3 and len(slots) >= each * k:
        different = rng.sample(slots, each * k)
        return [different[i * k : (i + 1) * k] for i in range(each)]
    rows = [rng.sample(slots, min(k, len(slots)))]
    for _ in range(1, each):
        same = rng.sample(rows[-1], len(rows[-1]) * 2 // 3)
        others = rng.sample([slot for slot in slots if slot not in same], len(rows[-1]) - len(same))
        rows.append(rng.sample(same + others, len(rows[-1])))
    count = rng.choice([k, k, rng.randrange(k + 1)])
    return [(row[:count] + [-1] * k)[:k] for row in rows]


def steps(seed: int, each: int, k: int, shared: bool) -> Iterator[list[tuple[int, list[list[int]]]]]:
    """Requests of steps: their sets, of three, and rows. Pages of theirs are resident or spilled; ``shared``: they hold
    the same spilled pages and no others."""
    rng, sets = random.Random(seed), 3
    free = rng.sample(range(PAGES, PAGES + SPILLED), SPILLED)
    of_set = {i: free[:5] if shared else rng.sample(range(PAGES), 2) + free[i::sets] for i in range(sets)}
    for _ in range(12 if INTERPRETED else 40):
        running = rng.sample(range(sets), rng.randint(1, sets))
        yield [(i, selections(rng, each, k, of_set[i])) for i in running]


@pytest.mark.parametrize(("each", "k", "hot_rows"), [(1, 6, 6), (1, 5, 9), (3, 4, 12), (2, 7, 17)])
def test_rows_are_those_of_the_plain_model(
    device: str, monkeypatch: pytest.MonkeyPatch, each: int, k: int, hot_rows: int
) -> None:
    """The same hot rows, in the same order; a padding request beside; hot sets down to what a step selects. The kernel
    looks at 4 slots or 4 hot rows at a time."""
    monkeypatch.setattr(file, "_AT_ONCE", 4)
    tables, model, padding = Tables(3, hot_rows, device), Model(3, hot_rows), [[-1] * k] * each
    asked = missed = 0
    for requests in steps(each, each, k, shared=False):
        rows = [row for _, of_request in [*requests, (3, padding)] for row in of_request]
        sets = torch.tensor([own for own, _ in requests] + [3], dtype=torch.int32, device=device)
        resolved, source, target = tables.resolve(torch.tensor(rows, dtype=torch.int32, device=device), sets)
        wanted = [model.resolve(*one) for one in requests]
        assert resolved.tolist() == [row for rows, _ in wanted for row in rows] + padding
        for i, (_, fetched) in enumerate([*wanted, ([], [])]):
            pairs = zip(source[i].tolist(), target[i].tolist(), strict=True)
            assert [*pairs] == fetched + [(-1, -1)] * (each * k - len(fetched))
            missed += len(fetched)
        asked += sum(slot >= LIMIT for row in rows for slot in row)
        assert tables.of_set[:3, 0].tolist() == model.hands
        tables.check()
    assert tables.of_set[:, 2:].sum(0).tolist() == [asked, missed] and 0 < missed < asked


@pytest.mark.parametrize(("each", "k", "hot_rows"), [(1, 6, 6), (3, 5, 15)])
@pytest.mark.parametrize("shared", [False, True])
def test_resolved_rows_hold_what_was_selected(device: str, each: int, k: int, hot_rows: int, shared: bool) -> None:
    """Whatever spilled pages have got since, and whatever other request holds them; resident rows stay."""
    tables, rng = Tables(3, hot_rows, device), random.Random(0)
    resident = tables.pool[:PAGES].clone()
    for requests in steps(10 + each, each, k, shared):
        for page in rng.sample(range(SPILLED), rng.choice([0, 1, 5])):
            tables.host[page] = torch.randint(1000, tables.host[page].shape, dtype=torch.int16)
            tables.where[page] = -1
        rows = [row for _, of_request in requests for row in of_request]
        slots = torch.tensor(rows, dtype=torch.int32, device=device)
        resolved, *fetched = tables.resolve(slots, torch.tensor([own for own, _ in requests]).int().to(device))
        fetch_rows(tables.pool, tables.host, *fetched)
        assert torch.equal(resolved < 0, slots < 0) and torch.equal(resolved[slots < LIMIT], slots[slots < LIMIT])
        of_set = torch.tensor([own for own, of_request in requests for _ in of_request], device=device)[:, None]
        inside = (resolved - LIMIT) // hot_rows == of_set
        assert bool((inside | (slots < LIMIT)).all())
        everywhere = torch.cat((resident.cpu(), tables.host)).view(-1, WIDTH)
        read = tables.pool.view(-1, WIDTH)[resolved[slots >= 0].long()].cpu()
        assert torch.equal(read, everywhere[slots[slots >= 0].long().cpu()])
        assert torch.equal(tables.pool[:PAGES], resident)
        tables.check()


@pytest.mark.parametrize("columns", [6, 82, 3])
def test_many_rows_are_fetched(device: str, columns: int) -> None:
    """More than all programs of a request copy at a time, and none of another."""
    pool = torch.zeros(30, 8, columns, dtype=torch.uint8, device=device)
    host = torch.randint(256, (40, 8, columns)).byte()
    rows, slots = torch.randperm(320)[:200].int().view(2, 100), torch.randperm(240)[:200].int().view(2, 100)
    rows[0, 90:], rows[1] = -1, -1
    wanted = pool.cpu().clone().view(-1, columns)
    wanted[slots[0, :90].long()] = host.view(-1, columns)[rows[0, :90].long()]
    fetch_rows(pool, host.pin_memory() if device == "cuda" else host, rows.to(device), slots.to(device))
    assert torch.equal(pool.cpu().view(-1, columns), wanted)
