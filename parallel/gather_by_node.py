"""Collectives of a group that spans nodes, in two levels: along rails between nodes, and inside each node.

A group has k ranks on each of m nodes, n in all, and each rank has a part of b bytes. A node lacks
``(n − k) · b``, and no all-gather brings less over its link. A ring in order of rank, as Gloo runs it, and NCCL over
several adapters at once, brings ``(n − 1) · b``: the parts of a node's own ranks come back to it. Along rails each
rank gathers the parts of one rank of every node, which brings ``k · (m − 1) · b = (n − k) · b`` to a node. Then
the ranks of a node gather what each of them has, m parts a rank.

| nodes × ranks | ring, parts to a node | rails | ratio |
|---|---|---|---|
| 2 × 2 | 3 | 2 | 1.50 |
| 2 × 8 | 15 | 8 | 1.88 |
| 8 × 8 | 63 | 56 | 1.12 |

Fewer bytes are not always faster. If the ranks of a node share its adapter, as with TCP, the slow link decides, and
rails are faster by the ratio above. If each rank has an adapter, the links inside decide: a ring uses both kinds of
link at once, and rails use them in turn. For parts of 1 MB on 2 × 8 H100s, :class:`.links.Links` models 66 µs for the
ring and 85 µs for rails, so on NCCL the ring stays.

With few bytes the steps decide. A ring of 64 ranks on 8 nodes takes 63, rails 7 and then 7 inside: for the rows of a
decode step, 84 and 42 µs before the first byte (:func:`.traffic.largest_part`). A reduce-scatter takes the same ways
back, and adds the sums of a node before they cross.
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
    """Carries all-gathers and reduce-scatters of a group; bytes are those of ``rail`` and ``node``.

    Attributes:
        rail, node: the ranks of this rank's rail, and those of its node in the group.
        side_stream: the stream of asynchronous ones, on which the second level follows the first.
        max_part: bytes of a rank up to which they are carried; others are the backend's.
    """

    rail: Group
    node: Group
    side_stream: SideStream
    max_part: int = sys.maxsize

    def gather(self, rows: torch.Tensor, asynchronous: bool, by_rail: bool) -> Callable[[], torch.Tensor]:
        rail, node = self.rail, self.node

        def inside(between: torch.Tensor) -> torch.Tensor:
            gathered = node.all_gather(between)
            return gathered if by_rail else _turned(gathered, node.size, rail.size)

        if asynchronous:
            start = partial(rail.all_gather_async, rows)
            return self.side_stream.relay(start, lambda wait: inside(wait()), rows)
        gathered = inside(rail.all_gather(rows))
        return lambda: gathered

    def reduce(self, rows: torch.Tensor, asynchronous: bool, by_rail: bool) -> Callable[[], torch.Tensor]:
        rail, node = self.rail, self.node

        def ordered() -> torch.Tensor:
            return rows if by_rail else _turned(rows, rail.size, node.size)

        if asynchronous:

            def start() -> Callable[[], torch.Tensor]:
                return node.reduce_scatter_async(ordered())

            return self.side_stream.relay(start, lambda wait: rail.reduce_scatter(wait()), rows)
        reduced = rail.reduce_scatter(node.reduce_scatter(ordered()))
        return lambda: reduced

    def by_rank(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows by rail in the order of ranks."""
        return _turned(rows, self.node.size, self.rail.size)


def _turned(rows: torch.Tensor, outer: int, inner: int) -> torch.Tensor:
    """``[outer · inner · R, ...]`` as ``[inner · outer · R, ...]``."""
    return rows.view(outer, inner, len(rows) // (outer * inner), *rows.shape[1:]).transpose(0, 1).flatten(0, 2)


def gather_group(
    group: Group,
    groups: Sequence[Sequence[int]],
    nodes: Sequence[int],
    device: torch.device,
    make: Callable[[Sequence[Sequence[int]]], Group],
) -> Group:
    """``group``, or under Gloo the same ranks that gather along rails, if each of several nodes has equally many of
    them, one node after the other. Every rank of the mesh calls this.

    Args:
        group: this rank's one of ``groups``, which are disjoint and hold all ranks of the mesh.
        nodes: the node of each rank of the mesh.
        device: the device of the rows.
        make: returns this rank's group if all ranks are divided as given; every rank calls it with the same argument.
    """
    if device.type == "cuda":
        return group
    inside: list[list[int]] = []
    rails: list[list[int]] = []
    for ranks in groups:
        where = [nodes[rank] for rank in ranks]
        if are_equal_neighbours(where):
            inside += [[rank for rank in ranks if nodes[rank] == node] for node in dict.fromkeys(where)]
            rails += [[ranks[index] for index in rail] for rail in rails_of(where)]
        else:
            inside += [[rank] for rank in ranks]
            rails += [[rank] for rank in ranks]
    node, rail = make(inside), make(rails)
    return group if rail.size == 1 else replace(group, two_level=TwoLevels(rail, node, SideStream(device)))


def with_small_parts(
    group: Group,
    nodes: Sequence[int],
    device: torch.device,
    make: Callable[[Sequence[Sequence[int]]], Group],
) -> Group:
    """``group`` of all ranks of the mesh, or the same that gathers and reduces small parts in two levels, if that is
    faster by the modelled links. Every rank calls this, with arguments as of :func:`gather_group`."""
    limit = largest_part(len(nodes), len(set(nodes))) if are_equal_neighbours(nodes) else 0
    if limit == 0:
        return group
    inside = [[rank for rank, node in enumerate(nodes) if node == one] for one in dict.fromkeys(nodes)]
    return replace(group, two_level=TwoLevels(make(rails_of(nodes)), make(inside), SideStream(device), limit))
