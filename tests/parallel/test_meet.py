"""Ranks that wait for each other outside of collectives. Threads stand for processes, over a store of one process."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from dsa_engine.parallel import Mesh, ParallelConfig, agreement, failure
from dsa_engine.parallel.failure import SIGN_OF_LIFE
from dsa_engine.parallel.group import Group


class Rank(Mesh):
    """A mesh whose groups are never used."""

    def _group(self, size: int, communicator: int = 0) -> Group:
        first = self.rank - self.rank % size
        return Group(tuple(range(first, first + size)), self.rank - first, object())  # type: ignore[arg-type]

    def _host_group(self) -> Group:
        return self.world


@pytest.fixture
def store() -> dist.Store:
    return dist.HashStore()


@pytest.fixture
def meshes(monkeypatch: pytest.MonkeyPatch, store: dist.Store) -> list[Rank]:
    own = threading.local()  # each process counts its own meetings
    monkeypatch.setattr(agreement, "run_store", lambda: store)

    class Times:
        def _mine(self) -> Counter[str]:
            return own.__dict__.setdefault("times", Counter())

        def __getitem__(self, who: str) -> int:
            return self._mine()[who]

        def __setitem__(self, who: str, count: int) -> None:
            self._mine()[who] = count

    monkeypatch.setattr(agreement, "_meetings_held", Times())
    config = ParallelConfig(timeout=0.05)  # for collectives; there are none here
    return [Rank(config, rank, 3, torch.device("cpu")) for rank in range(3)]


def test_the_slowest_is_waited_for(meshes: list[Rank]) -> None:
    came: list[int] = []

    def run(mesh: Rank) -> None:
        time.sleep(0.3 * mesh.rank)
        came.append(mesh.rank)
        mesh.together(lambda: None, 30.0)
        assert len(came) == 3

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(run, meshes))


def test_who_does_not_come_is_named(meshes: list[Rank]) -> None:
    with ThreadPoolExecutor(2) as pool:
        first, second = (pool.submit(meshes[rank].together, lambda: None, wait) for rank, wait in ((0, 0.2), (1, 1.0)))
        with pytest.raises(TimeoutError, match="rank 2 has not come to the start of the run for 0.2 seconds"):
            first.result()
        with pytest.raises(TimeoutError, match="rank 0 has not come"):
            second.result()


def test_an_error_of_one_rank_is_raised_on_all(meshes: list[Rank]) -> None:
    """Also one that cannot be sent, and that of the first rank; the rank that fails does not wait for the others."""

    class Local(Exception):
        pass

    failed, errors = threading.Barrier(3), (KeyError("a"), Local("b"), ValueError("c"))

    def work(mesh: Rank, failing: int) -> int:
        if mesh.rank == failing:
            raise errors[failing]
        return mesh.rank

    def run(mesh: Rank) -> list[str]:
        raised = []
        for failing in range(3):
            with pytest.raises(Exception) as caught:
                mesh.together(lambda failing=failing: work(mesh, failing), 30.0)  # type: ignore[misc]
            raised.append(repr(caught.value))
            failed.wait(30.0)
        assert mesh.together(lambda: mesh.rank, 30.0) == mesh.rank
        return raised

    with ThreadPoolExecutor(3) as pool:
        raised = list(pool.map(run, meshes))
    sent = ["KeyError('a')", "RuntimeError('Local: b')", "ValueError('c')"]
    assert raised == [sent, [sent[0], "Local('b')", sent[2]], sent]


@pytest.mark.parametrize("kind", ["hash", "tcp"])
def test_the_store_keeps_the_keys_of_the_last_meeting_only(
    monkeypatch: pytest.MonkeyPatch, meshes: list[Rank], store: dist.Store, kind: str
) -> None:
    connection = threading.local()
    if kind == "tcp":
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        monkeypatch.setattr(agreement, "run_store", lambda: connection.store)
    before = store.num_keys()

    def run(mesh: Rank) -> list[str]:
        if kind == "tcp":
            client = dist.TCPStore("127.0.0.1", store.port, is_master=False, wait_for_workers=False)
            connection.store = dist.PrefixStore("run", client)
        rng = random.Random(mesh.rank)
        verdicts = []
        for number in range(20):
            time.sleep(rng.random() * 0.01)
            meeting = agreement.Meeting(range(3), mesh.rank)
            verdicts.append(meeting.hold(f"{number} {mesh.rank}", lambda texts: repr(sorted(texts.items())), 30.0))
            if number % 3 == 0:
                mesh.together(lambda: None, 30.0)
        return verdicts

    with ThreadPoolExecutor(3) as pool:
        verdicts = list(pool.map(run, meshes))
    assert verdicts == [[repr([(r, f"{n} {r}") for r in range(3)]) for n in range(20)]] * 3
    assert store.num_keys() - before == 4, "three texts and a verdict"


def test_a_store_that_does_not_answer_ends_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the process that has it were stopped; with a launcher's store no rank is ended for that."""
    asked, go_on, said, ended = threading.Event(), threading.Event(), list[str](), threading.Event()

    class Stopped:
        def check(self, _: list[str]) -> bool:
            asked.set()
            go_on.wait(60)
            raise RuntimeError

    monkeypatch.setattr(failure, "_POLL_S", 0.01)
    monkeypatch.setattr(failure, "_connect", lambda _: Stopped())
    monkeypatch.setattr(failure, "_say", said.append)
    monkeypatch.setattr(failure._Reporter, "_end", lambda self, _: (self._left.set(), ended.set()))
    failure._Reporter(lambda *_: None).connect(0.1)
    assert asked.wait(60) and ended.wait(60)
    assert said == ["[rank 0] ends, because the store of the run, which rank 0 has, is silent for 0.1 s: stopped"]
    go_on.set()


def test_a_rank_that_shows_no_sign_of_life_is_not_waited_for(meshes: list[Rank], store: dist.Store) -> None:
    """One that lives is waited for, for longer than a silent one."""
    store.add(SIGN_OF_LIFE.format(1), 1)
    with pytest.raises(TimeoutError, match="no sign of life from rank 1 for 0.05 s: ended, or stopped"):
        agreement.Meeting([0, 1], 0).all_succeed(lambda: None, 7200.0, 0.05)
    lives, silent_s = threading.Event(), 3.0

    def live() -> None:
        while not lives.wait(0.01):
            store.add(SIGN_OF_LIFE.format(2), 1)

    with ThreadPoolExecutor(3) as pool:
        pool.submit(live)
        first = pool.submit(agreement.Meeting([0, 2], 0).all_succeed, lambda: 5, 7200.0, silent_s)
        time.sleep(1.3 * silent_s)
        assert not first.done()
        assert agreement.Meeting([0, 2], 2).all_succeed(lambda: 6, 7200.0) == 6
        assert first.result() == 5
        lives.set()
