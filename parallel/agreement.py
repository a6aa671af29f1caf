"""Compares what must be the same on all ranks of a mesh before anything depends on it, and names the ranks that differ.

Texts go through the store of the run: ranks that differ could wait for each other in collectives of different shapes.
"""

from __future__ import annotations

import json
import math
import pickle
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TypeVar

import torch.distributed as dist

from dsa_engine.parallel.failure import SIGN_OF_LIFE, run_store

T = TypeVar("T")
_meetings_held: Counter[str] = Counter()  # by the ranks that took part
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.0005, 0.05  # between two questions to the store


def compare(mine: Mapping[str, str], ranks: Sequence[int], rank: int, wait_s: float) -> None:
    """Compares texts by name over some ranks of the run (ascending), all of which call this: ``ValueError`` on all of
    them if a text differs. ``wait_s``: longest wait for another rank, then a ``TimeoutError``."""

    def judge(texts: Mapping[int, str]) -> str:
        return "; ".join(differences({other: json.loads(text) for other, text in texts.items()}))

    verdict = Meeting(ranks, rank).hold(json.dumps(dict(mine)), judge, wait_s)
    if verdict:
        raise ValueError(f"the ranks were started differently: {verdict}; start all of them alike")


def store_of_run() -> dist.Store:
    return run_store() or dist.PrefixStore("dsa_engine", dist.distributed_c10d._get_default_store())


class Meeting:
    """One exchange in which each of some ranks leaves a text, and the first rank makes a verdict of them for all.

    Every rank makes and holds the same meetings in the same order. The first rank deletes what the meeting before left
    in the store: a rank that has come to this one has its verdict, or no longer waits for it.
    """

    def __init__(self, ranks: Sequence[int], rank: int):
        self._ranks = list(ranks)
        self._rank = rank
        self._store = store_of_run()
        self._number = _meetings_held[str(self._ranks)]
        self._silent_s = math.inf

    def say(self, text: str) -> None:
        self._store.set(self._key(self._rank), text)

    def leave(self) -> None:
        """Makes the next meeting of these ranks another one, for this rank."""
        _meetings_held[str(self._ranks)] += 1

    def texts(self, wait_s: float, check: Callable[[], None] = lambda: None) -> dict[int, str]:
        """The texts of all other ranks, by rank; ``check``, called during the wait, may raise."""
        return {rank: self._get(rank, rank, wait_s, check) for rank in self._ranks if rank != self._rank}

    def hold(self, text: str, judge: Callable[[Mapping[int, str]], str], wait_s: float) -> str:
        """Leaves ``text`` and returns the verdict, which ``judge`` makes on the first rank from the texts of all; the
        next meeting of these ranks is another one. ``wait_s``: see :func:`compare`."""
        self.leave()
        self.say(text)
        first = self._ranks[0]
        if self._rank != first:
            return self._get("verdict", first, wait_s)
        verdict = judge({first: text, **self.texts(wait_s)})
        self._store.set(self._key("verdict"), verdict)
        self._delete_last()
        return verdict

    def all_succeed(self, work: Callable[[], T], wait_s: float, silent_s: float = math.inf) -> T:
        """Returns what ``work`` returns on this rank, when it has returned on all ranks. If it raises, the error of the
        first rank to fail is raised on every rank; a rank whose ``work`` fails waits for no other. ``wait_s``: as in
        :func:`compare`, after this rank's ``work``; ``silent_s``: longest wait for a rank without a sign of life."""
        self.leave()
        self._silent_s, verdict = silent_s, self._key("verdict")

        def check() -> None:
            if self._store.check([verdict]):
                raise pickle.loads(bytes.fromhex(self._store.get(verdict).decode()))

        try:
            result = work()
        except Exception as error:
            mine = _pickled(error)
            if self._store.compare_set(verdict, "", mine).decode() == mine:
                raise
            check()
        first = self._ranks[0]
        if self._rank == first:
            self.texts(wait_s, check)
            self._delete_last()
        self.say("")
        if self._rank != first:
            self._get(first, first, wait_s, check)
        return result

    def _delete_last(self) -> None:
        names: list[int | str] = [*self._ranks, "verdict"]
        for name in names:
            with suppress(RuntimeError):  # a store that cannot delete keeps a few hundred bytes
                self._store.delete_key(self._key(name, self._number - 1))

    def _key(self, name: int | str, number: int | None = None) -> str:
        return f"agreement {self._number if number is None else number} of {self._ranks}: {name}"

    def _get(self, name: int | str, rank: int, wait_s: float, check: Callable[[], None] = lambda: None) -> str:
        key, lives, sign, pause = self._key(name), SIGN_OF_LIFE.format(rank), b"", _FIRST_PAUSE_S
        begun = heard = time.monotonic()
        while not self._store.check([key]):
            check()
            now = time.monotonic()
            if self._store.check([lives]) and (new := self._store.get(lives)) != sign:
                sign, heard = new, now
            if sign and now - heard > self._silent_s:
                raise TimeoutError(f"no sign of life from rank {rank} for {self._silent_s:g} s: ended, or stopped")
            if now - begun > wait_s:
                raise TimeoutError(f"rank {rank} has not come to the start of the run for {wait_s:g} seconds")
            time.sleep(pause)
            pause = min(2 * pause, _LAST_PAUSE_S)
        return self._store.get(key).decode()


def _pickled(error: Exception) -> str:
    """An error for the store; another one, with its text, if it cannot be sent."""
    try:
        data = pickle.dumps(error)
        pickle.loads(data)
    except Exception:
        data = pickle.dumps(RuntimeError(f"{type(error).__name__}: {error}"))
    return data.hex()


def differences(by_rank: Mapping[int, Mapping[str, str]]) -> list[str]:
    """A sentence for each name whose texts differ: "a is 1 on rank 0, 2 and 7 on rank 1"."""
    names = dict.fromkeys(name for texts in by_rank.values() for name in texts)
    sentences = []
    for name in names:
        ranks_with: dict[str, list[int]] = {}
        for rank, texts in by_rank.items():
            ranks_with.setdefault(texts.get(name, "not known"), []).append(rank)
        if len(ranks_with) > 1:
            values = (f"{text:.80} on rank {', '.join(map(str, ranks))}" for text, ranks in ranks_with.items())
            sentences.append(f"{name} is {' and '.join(values)}")
    return sentences
