"""Ranks that wait for each other outside of collectives. Threads stand for processes, over a store of one process."""

from __future__ import annotations

import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from dsa_engine.parallel import Mesh, ParallelConfig, agreement
from dsa_engine.parallel.group import Group


class Rank(Mesh):
    """A mesh whose groups are never used."""

    def _group(self, size: int) -> Group:
        first = self.rank - self.rank % size
        return Group(tuple(range(first, first + size)), self.rank - first, object())  # type: ignore[arg-type]

    def _host_group(self) -> Group:
        return self.world


@pytest.fixture
def meshes(monkeypatch: pytest.MonkeyPatch) -> list[Rank]:
    store = dist.HashStore()
    own = threading.local()  # each process counts its own meetings
    monkeypatch.setattr(agreement, "run_store", lambda: store)

    class Times:
        def _mine(self) -> Counter[str]:
            return own.__dict__.setdefault("times", Counter())

        def __getitem__(self, who: str) -> int:
            return self._mine()[who]

        def __setitem__(self, who: str, count: int) -> None:
            self._mine()[who] = count

    monkeypatch.setattr(agreement, "_times", Times())
    config = ParallelConfig(timeout=0.05)  # of collectives; nothing here is one
    return [Rank(config, rank, 3, torch.device("cpu")) for rank in range(3)]


def test_the_slowest_is_waited_for(meshes: list[Rank]) -> None:
    came: list[int] = []

    def run(mesh: Rank) -> None:
        time.sleep(0.3 * mesh.rank)
        came.append(mesh.rank)
        mesh.barrier(30.0)
        assert len(came) == 3

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(run, meshes))


def test_who_does_not_come_is_named(meshes: list[Rank]) -> None:
    with ThreadPoolExecutor(2) as pool:
        first, second = (pool.submit(mesh.barrier, wait) for mesh, wait in zip(meshes[:2], (0.2, 1.0), strict=True))
        with pytest.raises(TimeoutError, match="rank 2 has not come to the start of the run for 0.2 seconds"):
            first.result()
        with pytest.raises(TimeoutError, match="rank 0 has not come"):
            second.result()
