"""Plans how many replicas each expert has and which devices hold them, so that devices have equal loads.

The problem and the algorithm are those of the published expert-parallel load balancer (DeepSeek-V3 report, section
3.4), for one layer:

1. *hierarchical*, where groups of experts divide over nodes, so that a token whose router chooses few groups goes to
   few nodes: groups are packed into nodes, and each node is a problem of its own; else there is one node
2. each further replica goes to the expert whose replicas have the largest load
3. replicas are packed into devices, the largest first, each into the device with the smallest load that has room

The published algorithm may give a device an expert twice. The plan that avoids it is computed too, and the more even
one is taken. The result is a function of the loads alone, the same on every rank: it is computed in plain Python,
because sums of vectors differ from processor to processor in their last bits.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from heapq import heapify, heapreplace
from itertools import chain

Bins = list[list[int]]  # experts of each device, or groups of each node


def balance_layer(loads: Sequence[float], replicas: int, groups: int, nodes: int, devices: int) -> Bins:
    """The experts of each device, ascending.

    Args:
        loads: of each expert, not negative. Without any load all count as equal.
        replicas: number of physical experts, from ``max(experts, devices)`` to ``experts · devices``. If ``devices``
            does not divide it, the first devices hold one more.
        groups: number of groups of consecutive experts in the model's router.
        nodes: number of nodes, of consecutive devices. The plan is hierarchical if ``nodes`` divides ``groups`` and
            ``devices``, ``groups`` divides experts, and ``devices`` divides ``replicas``.
        devices: number of ranks that hold experts.
    """
    experts = len(loads)
    loads = [float(load) for load in loads] if any(loads) else [1.0] * experts
    if any((groups % nodes, devices % nodes, experts % groups, replicas % devices)):
        groups = nodes = 1
    plans = [_planned(loads, replicas, groups, nodes, devices, twice) for twice in (False, True)]
    return min(plans, key=lambda held: imbalance(loads, held))


def _planned(loads: Sequence[float], replicas: int, groups: int, nodes: int, devices: int, twice: bool) -> Bins:
    size, each, on_node = len(loads) // groups, replicas // nodes, devices // nodes
    of_groups = [math.fsum(loads[group * size : (group + 1) * size]) for group in range(groups)]
    held: Bins = []
    for node in _packed(of_groups, range(groups), [groups // nodes] * nodes):
        within = _replicated(loads, [group * size + i for group in node for i in range(size)], each)
        counts = Counter(within)
        shared = [load / max(1, counts[expert]) for expert, load in enumerate(loads)]
        sizes = [each // on_node + (device < each % on_node) for device in range(on_node)]
        held += map(sorted, _packed(shared, within, sizes, twice))
    return held


def imbalance(loads: Sequence[float], held: Sequence[Sequence[int]]) -> float:
    """The largest load of a device, which has these logical experts, over the mean; replicas of an expert have equal
    parts of its load. 1 without any load."""
    counts, total = Counter(chain(*held)), math.fsum(loads)
    largest = max(math.fsum(loads[expert] / counts[expert] for expert in experts) for experts in held)
    return largest * len(held) / total if total else 1.0


def _replicated(loads: Sequence[float], experts: list[int], count: int) -> list[int]:
    """The experts, and replicas of those whose replicas have the largest loads: ``count`` in all."""
    heap = [(-loads[expert], expert, 1) for expert in experts]
    heapify(heap)
    items = list(experts)
    for _ in range(count - len(experts)):
        _, expert, replicas = heap[0]
        items.append(expert)
        heapreplace(heap, (-loads[expert] / (replicas + 1), expert, replicas + 1))
    return items


def _packed(loads: Sequence[float], items: Sequence[int], sizes: Sequence[int], twice: bool = True) -> Bins:
    """Packs items (equal numbers are replicas) into bins of given sizes by the ``loads`` of a replica of each number.
    ``twice``: whether a bin may have several replicas of an item; else only if all bins with room have one."""
    bins: Bins = [[] for _ in sizes]
    total = [0.0] * len(sizes)
    for item in sorted(items, key=lambda item: -loads[item]):
        room = [number for number, size in enumerate(sizes) if len(bins[number]) < size]
        new = room if twice else [number for number in room if item not in bins[number]]
        chosen = min(new or room, key=lambda number: total[number])
        bins[chosen].append(item)
        total[chosen] += loads[item]
    return bins
