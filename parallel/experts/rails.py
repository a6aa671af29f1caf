"""Rails: groups with one rank of every node (or more, where nodes differ in size).

In a dispatch by node, a token travels along its rail to each node with experts of it, and from there to their ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache


def rails_of(nodes: Sequence[int]) -> list[list[int]]:
    """The ranks of each rail: there are as many rails as the smallest node has ranks, and each node has a rank in
    every rail.

    Args:
        nodes: the node of every rank.
    """
    return [[*rail] for rail in _rails(tuple(nodes))]


@lru_cache(maxsize=64)
def _rails(nodes: tuple[int, ...]) -> list[list[int]]:
    count = min(Counter(nodes).values())
    taken: Counter[int] = Counter()
    rails: list[list[int]] = [[] for _ in range(count)]
    for rank, node in enumerate(nodes):
        rails[taken[node] % count].append(rank)
        taken[node] += 1
    return rails


def largest_groups(nodes: Sequence[int]) -> tuple[int, int]:
    """Number of ranks of the largest rail, and of the largest node."""
    return max(map(len, rails_of(nodes))), max(Counter(nodes).values())


def peers_of(rank: int, nodes: Sequence[int]) -> dict[int, int]:
    """By node, the rank that takes the tokens of ``rank`` there: one of its rail; ``rank`` itself at home."""
    (rail,) = [rail for rail in _rails(tuple(nodes)) if rank in rail]
    home = [one for one in rail if nodes[one] == nodes[rank]].index(rank)
    peers = {}
    for node in set(nodes):
        there = [one for one in rail if nodes[one] == node]
        peers[node] = there[home % len(there)]
    return peers | {nodes[rank]: rank}


def has_two_levels(nodes: Sequence[int]) -> bool:
    """Whether there are several nodes, one of them with several ranks. Else a dispatch by node is an all-to-all."""
    return 1 < len(set(nodes)) < len(nodes)
