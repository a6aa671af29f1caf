"""Ranks that are threads of this process, with real collectives of Gloo between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from dsa_engine.parallel.collective_log import CollectiveLog
from dsa_engine.parallel.group import Group

Result = TypeVar("Result")


def gloo_group(store: dist.Store, ranks: Sequence[int], rank: int) -> Group:
    """The group of ``ranks``, as ``rank`` sees it; its collectives are logged. Groups of one store have different
    ranks."""
    index, name = list(ranks).index(rank), "-".join(map(str, ranks))
    if len(ranks) == 1:
        return Group(tuple(ranks), 0, None)
    store, gloo = dist.PrefixStore(name, store), dist.ProcessGroup.BackendType.GLOO
    handle = dist.ProcessGroup(store, index, len(ranks))
    backend = dist.ProcessGroupGloo(store, index, len(ranks), timedelta(seconds=30))
    handle._register_backend(torch.device("cpu"), gloo, backend)
    handle._set_default_backend(gloo)
    return Group(tuple(ranks), index, handle, log=CollectiveLog())


def on_ranks(size: int, work: Callable[[Group], Result]) -> list[Result]:
    """Runs ``work`` on each rank of a group of ``size``, whose collectives are logged; returns all results."""
    store = dist.HashStore()

    def run(rank: int) -> Result:
        return work(gloo_group(store, range(size), rank))

    with ThreadPoolExecutor(size) as ranks:
        return list(ranks.map(run, range(size)))


def exchange_unregistered(
    group: Group, sends: Sequence[tuple[torch.Tensor, int]], receives: Sequence[tuple[torch.Tensor, int]]
) -> None:
    """The same messages on a group of threads, which torch.distributed does not know."""
    assert group.handle is not None
    works = [group.handle.send([rows], peer, 0) for rows, peer in sends]
    works += [group.handle.recv([rows], peer, 0) for rows, peer in receives]
    for work in works:
        work.wait()
