"""Block tables that stay on the device, against lists of pages; and the order of passes through the layers."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch

from dsa_engine.kernels.runtime.launch import INTERPRETED
from dsa_engine.model.forward_batch import BlockTables, Pass, run_interleaved
from fake_cuda import FakeDevice


class _Table(BlockTables):
    """One whose device is not the host: what is not written to it is not there."""

    def __init__(self) -> None:
        super().__init__(16, torch.device("cpu"))
        self._on_device = self.host.clone()

    def rows(self, requests: Sequence[list[int]]) -> list[int]:
        rows = super().rows(requests)
        if self._on_device is self.host:  # it has grown
            self._on_device = self.host.clone()
        return rows


def check(tables: BlockTables, requests: list[list[int]]) -> None:
    rows, width = tables.rows(requests), max(map(len, requests), default=0)
    table = tables.gather(rows, width).tolist()
    assert len(set(rows)) == len(requests) == len(table)
    for row, pages, actual in zip(rows, requests, table, strict=True):
        assert actual[: len(pages)] == pages
        assert tables.host[row, : len(pages)].tolist() == pages


def test_only_what_is_new_travels() -> None:
    tables = _Table()
    a, b = list(range(100, 140)), [7, 9]
    check(tables, [a, b])
    assert tables.uploaded == 42
    check(tables, [a, b])
    check(tables, [b])
    check(tables, [b, a])  # moved rows stay where they are
    assert tables.uploaded == 42
    b.append(11)
    a += [1, 2]
    check(tables, [a, b])
    assert tables.uploaded == 45
    b = [7, 9, 11]  # preempted, and given pages again: another list
    check(tables, [a, b])
    assert tables.uploaded == 48


def test_a_life_of_many_steps() -> None:
    """Requests that come, grow, leave, are preempted, and take turns, while the table grows in both directions."""
    chance, tables, running = random.Random(3), _Table(), list[list[int]]()
    for step in range(300):
        if len(running) < 5 + step // 4:
            running.append([chance.randrange(1 << 20) for _ in range(chance.choice((0, 1, 3, 70, 300)))])
        for i in range(len(running)):
            if chance.random() < 0.05:
                running[i] = [chance.randrange(1 << 20)]
            elif chance.random() < 0.3:
                running[i] += [chance.randrange(1 << 20)]
        if chance.random() < 0.2:
            running.pop(chance.randrange(len(running)))
        check(tables, [pages for pages in running if chance.random() < 0.8])
    assert tables.host.shape[0] >= 128 and tables.host.shape[1] >= 300


def test_a_buffer_is_written_where_it_holds_something_else() -> None:
    tables, a, b, c = _Table(), [1, 2], [3, 4, 5], [6]
    out, other = (torch.full((2, 4), -1, dtype=torch.int32) for _ in range(2))

    def held(*requests: list[int], into: torch.Tensor = out) -> list[list[int]]:
        table = tables.gather(tables.rows(requests), 4, into).tolist()
        return [row[: len(pages)] for row, pages in zip(table, requests, strict=True)]

    assert held(a, b) == held(a, b) == [a, b]
    assert held(b, a) == held(b, a, into=other) == [b, a]
    a.append(9)
    assert held(b, a) == held(b, a, into=other) == [b, a] and held(c, b) == [c, b] and held(b, a) == [b, a]
    out[:] = 0
    assert held(b, a) == [[0] * 3, [0] * 3], "nobody else writes there"


def test_nothing_is_lost_to_an_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    tables, a, b = _Table(), [1, 2], [3, 4, 5]
    out = torch.full((2, 4), -1, dtype=torch.int32)
    tables.gather(tables.rows([a, b]), 4, out)
    with monkeypatch.context() as patch:
        patch.setattr("dsa_engine.model.forward_batch.upload", lambda *_: exec("raise KeyboardInterrupt"))
        b.append(6)
        with pytest.raises(KeyboardInterrupt):
            tables.rows([a, b])
    check(tables, [b, a])
    assert tables.gather(tables.rows([a, b]), 4, out)[1].tolist() == b


def test_requests_without_pages() -> None:
    tables = BlockTables(16, torch.device("cpu"))
    assert tables.rows([]) == [] and tables.gather([], 0).shape == (0, 0)
    assert tables.gather(tables.rows([[]]), 0).shape == (1, 0)
    out = torch.full((2, 5), -1, dtype=torch.int32)
    assert tables.gather([0, 0], 5, out) is out and bool((out >= 0).all()), "padding names pages too"


@pytest.mark.skipif(INTERPRETED or torch.cuda.is_available(), reason="needs a device that is not there")
def test_the_host_waits_for_nothing() -> None:
    """On a device: a first step copies all page numbers, a later one the numbers of rows alone."""
    with FakeDevice() as device:
        tables = BlockTables(64, torch.device("cuda", 0))
        requests = [list(range(2000)) for _ in range(64)]
        out = tables.gather(tables.rows(requests), 2001)
        tables.gather(tables.rows(requests), 2001, out)
        with device.watched():
            tables.gather(tables.rows(requests), 2001, out)
        assert device.waits == device.launches == [], "it holds them already"
        requests[3].append(5)
        with device.watched():
            tables.gather(tables.rows(requests), 2001, out)
        assert device.waits == [] and device.count("copy") == 2 and len(device.launches) == 5


def test_passes_run_round_robin_up_to_their_transfers() -> None:
    ran: list[str] = []

    def one(name: str, transfers: int) -> Pass[str]:
        for number in range(transfers):
            ran.append(f"{name}{number}")
            yield "MoE dispatch"
        ran.append(f"{name} end")
        return name

    assert run_interleaved([one("a", 2), one("b", 2)]) == ["a", "b"]
    assert ran == ["a0", "b0", "a1", "b1", "a end", "b end"]
    ran.clear()
    assert run_interleaved([one("a", 2)]) == ["a"]
    assert ran == ["a0", "a1", "a end"]
