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


def on_ranks(size: int, work: Callable[[Group], Result]) -> list[Result]:
    """Runs ``work`` on each rank of a group of ``size``, whose collectives are logged; returns all results."""
    store, gloo = dist.HashStore(), dist.ProcessGroup.BackendType.GLOO

    def run(rank: int) -> Result:
        handle = dist.ProcessGroup(store, rank, size)
        handle._register_backend(
            torch.device("cpu"), gloo, dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=30))
        )
        handle._set_default_backend(gloo)
        return work(Group(tuple(range(size)), rank, handle, log=CollectiveLog()))

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
