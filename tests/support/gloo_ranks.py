"""Ranks that are threads of this process, with real collectives of Gloo between them."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TypeVar
from unittest.mock import patch

import torch
import torch.distributed as dist

from collectives import record
from dsa_engine.parallel import disaggregation
from dsa_engine.parallel.disaggregation import PageGroups
from dsa_engine.parallel.group import Group

Result = TypeVar("Result")


def gloo_group(store: dist.Store, ranks: Sequence[int], rank: int) -> Group:
    """The group of ``ranks``, as ``rank`` sees it; its collectives are logged. Groups of one store have different
    ranks."""
    index, name = list(ranks).index(rank), "-".join(map(str, ranks))
    if len(ranks) == 1:
        return Group(tuple(ranks), 0, None)
    group = Group(tuple(ranks), index, _gloo(dist.PrefixStore(name, store), index, len(ranks)))
    record(group)
    return group


def on_ranks(size: int, work: Callable[[Group], Result]) -> list[Result]:
    """Runs ``work`` on each rank of a group of ``size``, whose collectives are logged; returns all results."""
    store = dist.HashStore()

    def run(rank: int) -> Result:
        return work(gloo_group(store, range(size), rank))

    with ThreadPoolExecutor(size) as ranks:
        return list(ranks.map(run, range(size)))


def watch_transfers(group: Group, note: Callable[[str, str, int], object]) -> None:
    """Calls ``note(what, kind, number)`` where an asynchronous collective begins, and before it is waited for."""
    numbers = itertools.count()

    def watched(kind: str) -> Callable[..., Callable[[], object]]:
        start = getattr(group, f"{kind}_async")

        def begin(*given: object) -> Callable[[], object]:
            number = next(numbers)
            note("begin", kind, number)
            wait = start(*given)
            return lambda: (note("wait", kind, number), wait())[1]

        return begin

    for kind in ("all_to_all", "all_gather", "reduce_scatter"):
        setattr(group, f"{kind}_async", watched(kind))


def exchange_unregistered(
    group: Group, sends: Sequence[tuple[torch.Tensor, int]], receives: Sequence[tuple[torch.Tensor, int]]
) -> None:
    """The same messages on a group of threads, which torch.distributed does not know."""
    assert group.handle is not None
    works = [group.handle.send([rows], peer, 0) for rows, peer in sends]
    works += [group.handle.recv([rows], peer, 0) for rows, peer in receives]
    for work in works:
        work.wait()


def on_linked_ranks(
    senders: Sequence[int], receivers: Sequence[int], work: Callable[[int, PageGroups], Result]
) -> list[Result]:
    """Runs ``work`` on each rank of two parts of a run, with the groups for their pages; returns all results."""
    store, this = dist.HashStore(), threading.local()
    ranks = [*senders, *receivers]

    def new_group(members: Sequence[int], *_: object, **__: object) -> dist.ProcessGroup:
        return _gloo(store, members.index(this.rank), len(members))

    def run(rank: int) -> Result:
        this.rank = rank
        return work(rank, disaggregation.page_groups(rank, senders, receivers, torch.device("cpu"), 30))

    with (
        patch.object(disaggregation, "new_group", new_group),
        patch.object(Group, "_exchange_pairs", exchange_unregistered),
        ThreadPoolExecutor(len(ranks)) as threads,
    ):
        return list(threads.map(run, ranks))


def _gloo(store: dist.Store, rank: int, size: int) -> dist.ProcessGroup:
    handle, gloo = dist.ProcessGroup(store, rank, size), dist.ProcessGroup.BackendType.GLOO
    backend = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=30))
    handle._register_backend(torch.device("cpu"), gloo, backend)
    handle._set_default_backend(gloo)
    return handle
