"""What has to be the same on all ranks of a mesh is compared before anything depends on it; who differs is named.

Ranks that differ would wait for each other in collectives of different shapes, or compute together what nobody asked
for. So nothing here is a collective of theirs: texts go through the store of the run.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import timedelta

import torch.distributed as dist

from dsa_engine.parallel.failure import run_store

_times: Counter[str] = Counter()  # that the ranks have been compared


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
    store = run_store() or dist.PrefixStore("dsa_engine", dist.distributed_c10d._get_default_store())
    who = str(list(ranks))
    what = f"agreement {_times[who]} of {who}"
    _times[who] += 1
    store.set(f"{what}: {rank}", json.dumps(dict(mine)))
    if rank == ranks[0]:
        everybodys = {other: json.loads(_get(store, f"{what}: {other}", other, wait_s)) for other in ranks}
        store.set(f"{what}: verdict", "; ".join(differences(everybodys)))
    verdict = _get(store, f"{what}: verdict", ranks[0], wait_s)
    if verdict:
        raise ValueError(f"the ranks were started differently: {verdict}; start all of them alike")


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


def _get(store: dist.Store, key: str, rank: int, wait_s: float) -> str:
    try:
        store.wait([key], timedelta(seconds=wait_s))
    except (RuntimeError, dist.DistStoreError) as error:
        raise TimeoutError(f"rank {rank} has not come to the start of the run for {wait_s:g} seconds") from error
    return store.get(key).decode()
