"""Collectives of a group that spans machines, in two levels: along rails between machines, and inside each machine.

A group has k ranks on each of m machines, n in all, and each rank has a part of b bytes. A machine lacks
``(n − k) · b``, and no all-gather brings less over its link. A ring in order of rank, as Gloo runs it, and NCCL over
several adapters at once, brings ``(n − 1) · b``: the parts of a machine's own ranks come back to it. Along rails each
rank gathers the parts of one rank of every machine, which brings ``k · (m − 1) · b = (n − k) · b`` to a machine. Then
the ranks of a machine gather what each of them has, m parts a rank.

| machines × ranks | ring, parts to a machine | rails | ratio |
|---|---|---|---|
| 2 × 2 | 3 | 2 | 1.50 |
| 2 × 8 | 15 | 8 | 1.88 |
| 8 × 8 | 63 | 56 | 1.12 |

Fewer bytes are not always faster. If the ranks of a machine share its adapter, as with TCP, the slow link decides, and
rails are faster by the ratio above. If each rank has an adapter, the links inside decide: a ring uses both kinds of
link at once, and rails use them in turn. For parts of 1 MB on 2 × 8 H100s, :class:`.links.Links` models 66 µs for the
ring and 85 µs for rails, so on NCCL the ring stays.

With few bytes the steps decide. A ring of 64 ranks on 8 machines takes 63, rails 7 and then 7 inside: for the rows of a
decode step, 84 and 42 µs before the first byte (:func:`.traffic.largest_part`). A reduce-scatter takes the same ways
back, and adds the sums of a machine before they cross.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from dsa_engine.parallel.experts.rails import are_equal_neighbours, rails_of
from dsa_engine.parallel.experts.traffic import largest_part
from dsa_engine.parallel.group import Group
from dsa_engine.parallel.side_stream import SideStream


@dataclass(frozen=True)
class TwoLevels:
    """Carries all-gathers and reduce-scatters of a group; bytes and log entries are those of ``rail`` and ``machine``.

    Attributes:
        rail, machine: the ranks of this rank's rail, and those of its machine in the group.
        beside: the stream of asynchronous ones, on which the second level follows the first.
        max_part: bytes of a rank up to which they are carried; others are the backend's.
    """

    rail: Group
    machine: Group
    beside: SideStream
    max_part: int = sys.maxsize

    def gather(self, rows: torch.Tensor, asynchronous: bool, by_rail: bool) -> Callable[[], torch.Tensor]:
        rail, machine = self.rail, self.machine

        def inside(between: torch.Tensor) -> torch.Tensor:
            gathered = machine.all_gather(between)
            return gathered if by_rail else _turned(gathered, machine.size, rail.size)

        if asynchronous:
            start = partial(rail.all_gather_async, rows)
            return self.beside.relay(start, lambda wait: inside(wait()), rows)
        gathered = inside(rail.all_gather(rows))
        return lambda: gathered

    def reduce(self, rows: torch.Tensor, asynchronous: bool, by_rail: bool) -> Callable[[], torch.Tensor]:
        rail, machine = self.rail, self.machine

        def ordered() -> torch.Tensor:
            return rows if by_rail else _turned(rows, rail.size, machine.size)

        if asynchronous:

            def start() -> Callable[[], torch.Tensor]:
                return machine.reduce_scatter_async(ordered())

            return self.beside.relay(start, lambda wait: rail.reduce_scatter(wait()), rows)
        reduced = rail.reduce_scatter(machine.reduce_scatter(ordered()))
        return lambda: reduced

    def by_rank(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows by rail in the order of ranks."""
        return _turned(rows, self.machine.size, self.rail.size)


def _turned(rows: torch.Tensor, outer: int, inner: int) -> torch.Tensor:
    """``[outer · inner · R, ...]`` as ``[inner · outer · R, ...]``."""
    return rows.view(outer, inner, len(rows) // (outer * inner), *rows.shape[1:]).transpose(0, 1).flatten(0, 2)


def gather_group(
    group: Group,
    groups: Sequence[Sequence[int]],
    machines: Sequence[int],
    device: torch.device,
    make: Callable[[Sequence[Sequence[int]]], Group],
) -> Group:
    """``group``, or under Gloo the same ranks that gather along rails, if each of several machines has equally many of
    them, one machine after the other. Every rank of the mesh calls this.

    Args:
        group: this rank's one of ``groups``, which are disjoint and hold all ranks of the mesh.
        machines: the machine of each rank of the mesh.
        device: the device of the rows.
        make: returns this rank's group if all ranks are divided as given; every rank calls it with the same argument.
    """
    if device.type == "cuda":
        return group
    inside: list[list[int]] = []
    rails: list[list[int]] = []
    for ranks in groups:
        where = [machines[rank] for rank in ranks]
        if are_equal_neighbours(where):
            inside += [[rank for rank in ranks if machines[rank] == machine] for machine in dict.fromkeys(where)]
            rails += [[ranks[index] for index in rail] for rail in rails_of(where)]
        else:
            inside += [[rank] for rank in ranks]
            rails += [[rank] for rank in ranks]
    machine, rail = make(inside), make(rails)
    return group if rail.size == 1 else replace(group, levels=TwoLevels(rail, machine, SideStream(device)))


def with_small_parts(
    group: Group,
    machines: Sequence[int],
    device: torch.device,
    make: Callable[[Sequence[Sequence[int]]], Group],
) -> Group:
    """``group`` of all ranks of the mesh, or the same that gathers and reduces small parts in two levels, if that is
    faster by the modelled links. Every rank calls this, with arguments as of :func:`gather_group`."""
    limit = largest_part(len(machines), len(set(machines))) if are_equal_neighbours(machines) else 0
    if limit == 0:
        return group
    inside = [[rank for rank, machine in enumerate(machines) if machine == one] for one in dict.fromkeys(machines)]
    return replace(group, levels=TwoLevels(make(rails_of(machines)), make(inside), SideStream(device), limit))
