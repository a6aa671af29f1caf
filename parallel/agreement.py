"""What has to be the same on all ranks of a mesh is compared before anything depends on it; who differs is named.

Ranks that differ would wait for each other in collectives of different shapes, or compute together what nobody asked
for. So nothing here is a collective of theirs: texts go through the store of the run.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta

import torch.distributed as dist

from dsa_engine.parallel.failure.reporter import run_store

_times: Counter[str] = Counter()  # that the ranks have met
_SLICE_S = 1.0  # how often a rank that waits looks whether there is anything to wait for


def compare(mine: Mapping[str, str], ranks: Sequence[int], rank: int, wait_s: float) -> None:
    """Compares texts by name over some ranks of the run, all of which call this.

    Args:
        mine: this rank's.
        ranks: of the run, ascending.
        rank: of this process, one of them.
        wait_s: how long the others are waited for.

    Raises:
        ValueError: on all of them, where a text differs: which, and on which ranks.
        TimeoutError: a rank does not come.
    """

    def judge(texts: Mapping[int, str]) -> str:
        return "; ".join(differences({other: json.loads(text) for other, text in texts.items()}))

    verdict = Meeting(ranks, rank).hold(json.dumps(dict(mine)), judge, wait_s)
    if verdict:
        raise ValueError(f"the ranks were started differently: {verdict}; start all of them alike")


class Meeting:
    """One time that some ranks of the run leave a text each, of which the first one makes a verdict for all.

    Every rank makes and holds the same meetings in the same order.
    """

    def __init__(self, ranks: Sequence[int], rank: int):
        self._ranks = list(ranks)
        self._rank = rank
        self._store = run_store() or dist.PrefixStore("dsa_engine", dist.distributed_c10d._get_default_store())
        self._what = f"agreement {_times[str(self._ranks)]} of {self._ranks}"

    def say(self, text: str) -> None:
        """Leaves this rank's text."""
        self._store.set(f"{self._what}: {self._rank}", text)

    def texts(self, wait_s: float, check: Callable[[], None] = lambda: None) -> dict[int, str]:
        """What all others have said, by rank, once they have; see :meth:`hold`."""
        others = [rank for rank in self._ranks if rank != self._rank]
        return {other: self._get(f"{self._what}: {other}", other, wait_s, check) for other in others}

    def hold(
        self,
        text: str,
        judge: Callable[[Mapping[int, str]], str],
        wait_s: float,
        check: Callable[[], None] = lambda: None,
    ) -> str:
        """Says ``text``, and returns the verdict; the next meeting of these ranks is another one.

        Args:
            judge: makes the verdict of the texts of all ranks, on the first of them.
            wait_s: how long the others are waited for.
            check: called now and then while they are; raises where there is nothing to wait for.

        Raises:
            TimeoutError: a rank does not come.
        """
        _times[str(self._ranks)] += 1
        self.say(text)
        key, first = f"{self._what}: verdict", self._ranks[0]
        if self._rank == first:
            self._store.set(key, judge({first: text, **self.texts(wait_s, check)}))
        return self._get(key, first, wait_s, check)

    def _get(self, key: str, rank: int, wait_s: float, check: Callable[[], None]) -> str:
        until = time.monotonic() + wait_s
        while True:
            check()
            left = until - time.monotonic()
            try:
                self._store.wait([key], timedelta(seconds=max(0.001, min(_SLICE_S, left))))
                return self._store.get(key).decode()
            except (RuntimeError, dist.DistStoreError) as error:
                if left < _SLICE_S:
                    raise TimeoutError(
                        f"rank {rank} has not come to the start of the run for {wait_s:g} seconds"
                    ) from error


def differences(everybodys: Mapping[int, Mapping[str, str]]) -> list[str]:
    """A sentence for each name whose texts differ: "a is 1 on rank 0, 2 and 7 on rank 1"."""
    names = dict.fromkeys(name for theirs in everybodys.values() for name in theirs)
    found = []
    for name in names:
        holders: dict[str, list[int]] = {}
        for rank, theirs in everybodys.items():
            holders.setdefault(theirs.get(name, "not known"), []).append(rank)
        if len(holders) > 1:
            values = (f"{text:.80} on rank {', '.join(map(str, ranks))}" for text, ranks in holders.items())
            found.append(f"{name} is {' and '.join(values)}")
    return found
