"""P/D disaggregation: the first ranks of a run prefill, the others decode.

Each part has its own mesh. Two groups of all ranks carry what goes from one part to the other: one of the hosts, over
which two ranks agree that both are ready, and one of the devices, with one communicator for all pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import singledispatch
from typing import NamedTuple

import torch
import torch.distributed as dist

from dsa_engine.parallel.config import ParallelConfig
from dsa_engine.parallel.group import Group, new_group
from dsa_engine.parallel.mesh import Mesh

_MAX_CTAS = 1  # thread blocks, each on a multiprocessor that steps lack, that a message between parts takes


def part_options(prefill: ParallelConfig, decode: ParallelConfig) -> ParallelConfig:
    """The options of the part that this rank belongs to, out of those of both."""
    rank, ranks_that_prefill, size = position(prefill)
    parts = ("prefill", prefill, ranks_that_prefill), ("decode", decode, size - ranks_that_prefill)
    for part, config, ranks in parts:
        sizes = {"tp_size": config.tp_size}
        sizes |= {"cp_size": config.cp_size or 1} if part == "prefill" else {"dcp_size": config.dcp_size}
        for name, wanted in sizes.items():
            if ranks % wanted:
                option = name if part == "prefill" or wanted == getattr(prefill, name) else f"decode_options: {name}"
                raise ValueError(
                    f"{option} {wanted} does not divide the {ranks} rank(s) that {part}; see prefill_ranks"
                )
    return prefill if rank < ranks_that_prefill else decode


@singledispatch  # a kind of config may have its own kind of mesh, as emulated ranks do
def create_mesh(
    config: ParallelConfig, device: str = "auto", same: Callable[[], Mapping[str, str]] | None = None
) -> Mesh:
    """The mesh of this process; with ``prefill_ranks`` that of its part of the run. The decode part has
    context-parallel groups of ``dcp_size`` ranks, as it prefills nothing. :meth:`Mesh.create` has the arguments."""
    if config.prefill_ranks is None:
        return Mesh.create(config, device, same=same)
    rank, prefill, size = position(config)
    members = range(prefill) if rank < prefill else range(prefill, size)
    own = config if rank < prefill else replace(config, cp_size=config.dcp_size)
    return Mesh.create(own, device, members, same, range(size))


def position(config: ParallelConfig) -> tuple[int, int, int]:
    """This rank, the number of ranks that prefill, and that of all."""
    rank, size = config.run_position()
    prefill = config.prefill_ranks
    assert prefill is not None
    if prefill >= size:
        raise ValueError(
            f"prefill_ranks {prefill} leaves no rank to decode: the run has {size} rank(s); start more with torchrun, "
            "or lower prefill_ranks"
        )
    return rank, prefill, size


class PageGroups(NamedTuple):
    """Two groups of all ranks of a run, in order. On a CPU both have the same connections."""

    host: Group
    device: Group


def page_groups(
    rank: int, senders: Sequence[int], receivers: Sequence[int], device: torch.device, timeout: float
) -> PageGroups:
    """Makes the groups that carry pages from ``senders`` to ``receivers``; all ranks of the run call it. They exchange
    a message in each pair, so that NCCL's memory is taken and no later message has to connect first."""
    ranks = (*senders, *receivers)
    handle = over_devices = new_group(ranks, timeout, "gloo")
    if device.type == "cuda":
        nccl = dist.ProcessGroupNCCL.Options()
        nccl.config.max_ctas = _MAX_CTAS
        over_devices = new_group(ranks, timeout, options=nccl)
    groups = PageGroups(*(Group(ranks, ranks.index(rank), one) for one in (handle, over_devices)))
    word = torch.zeros(1, dtype=torch.int64, device=device)
    groups.device.all_gather(word)  # connects all, as NCCL wants before messages of pairs
    for sender, receiver in pairs_in_rounds(senders, receivers):
        if rank == sender:
            groups.device.exchange([(word, receiver)], [])
        elif rank == receiver:
            groups.device.exchange([], [(word, sender)])
        word.tolist()  # it has gone, or come
    groups.device.bytes_sent = 0
    return groups


def pairs_in_rounds(senders: Sequence[int], receivers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """All pairs of a sender and a receiver, in as many rounds as the larger part has ranks. A rank is in one pair of a
    round at most, so the pairs of a round connect at the same time."""
    count = max(len(senders), len(receivers))
    for shift in range(count):
        for index, sender in enumerate(senders):
            other = (index + shift) % count
            if other < len(receivers):
                yield sender, receivers[other]
