"""Groups of two ranks, for what goes from one part of the run to another.

Each pair has a process group of its own: with NCCL this is a communicator and a stream of its own, so a message that
waits for its other side delays no collective and no message of another pair. Messages of a pair keep their order;
between pairs there is none, and so no cycle of ranks that wait for each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from dsa_engine.parallel.group import Group

_MAX_CTAS = 4  # thread blocks of the device that a message takes, also while it waits for its other side


def pair_groups(
    rank: int, senders: Sequence[int], receivers: Sequence[int], device: torch.device, timeout: float
) -> dict[int, Group]:
    """Makes the groups of this rank with every rank of the other part, by its number in the run.

    All ranks of the run call it, as every rank takes part in making every group. They go through the pairs in one order
    and exchange a message in each, so that NCCL's memory is taken and no later message has to connect first. A pair
    without this rank costs it no message.

    Args:
        timeout: seconds after which a message that does not arrive ends the run.
    """
    groups = {}
    for sender, receiver in pairs_in_rounds(senders, receivers):
        pair = sorted((sender, receiver))
        # Without local synchronisation: the name that it gives a group counts the groups of a process, and ranks of a
        # pair have made different ones.
        options = _nccl_options() if device.type == "cuda" else None
        handle = dist.new_group(pair, timeout=timedelta(seconds=timeout), pg_options=options)
        if rank not in pair:
            continue
        group = Group(tuple(pair), pair.index(rank), handle)
        _connect(group, rank == sender, device)
        groups[receiver if rank == sender else sender] = group
    return groups


def pairs_in_rounds(senders: Sequence[int], receivers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """All pairs of a sender and a receiver, in as many rounds as the larger part has ranks.

    A rank is in one pair of a round at most, so the pairs of a round connect at the same time.
    """
    count = max(len(senders), len(receivers))
    for shift in range(count):
        for index, sender in enumerate(senders):
            other = (index + shift) % count
            if other < len(receivers):
                yield sender, receivers[other]


def _nccl_options() -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options.config.max_ctas = _MAX_CTAS
    return options


def _connect(group: Group, sends: bool, device: torch.device) -> None:
    word = torch.zeros(1, dtype=torch.int64, device=device)
    if sends:
        group.send(word, 1 - group.index)
    else:
        group.recv(word, 1 - group.index)
    word.tolist()  # it has come
    group.bytes_sent = 0
