"""Plans how many replicas each expert has and which devices hold them, so that devices have equal loads.

The problem is that of the published expert-parallel load balancer (DeepSeek-V3 report, section 3.4), and so are the two
ways: *hierarchical*, where groups of experts divide over nodes, so that a token whose router chooses few groups goes to
few nodes; and *global*. Steps of a layer:

1. hierarchical: groups are packed into nodes, and each node is a problem of its own
2. each further replica goes to the expert whose replicas have the largest load, within a limit
3. replicas are packed into devices, the largest first, each into the device with the smallest load
4. replicas are swapped between the device with the largest load and others while that makes it smaller

Steps 2 to 4 run with several limits, and the best result counts. The published balancer takes steps 1 to 3 without a
limit, and a device may hold an expert twice. That is computed too, and taken where it is better than all of these.

The result is a function of the loads alone, the same on every rank. It is computed in plain Python, because sums of
vectors differ from processor to processor in their last bits.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from heapq import heapify, heappop, heappush, heapreplace
from itertools import chain
from typing import NamedTuple

Bins = list[list[int]]  # experts of each device, or groups of each node

# No expert gets more replicas than make its load on each at most this part of a device's mean load. Two replicas of 0.6
# do not fit a device, one of 0.9 does. 0: replicas go where the load is largest.
_LIMITS = (0.0, 0.95, 0.85, 0.75)
_CLOSE = 2e-3  # a result this close to even loads is not improved


class Balance(NamedTuple):
    """Physical experts are numbered device after device.

    Attributes:
        physical_to_logical: ``[layers, replicas]``.
        logical_to_physical: ``[layers, experts, largest number of replicas]``, ascending, then −1.
        counts: ``[layers, experts]``, the number of replicas of each expert.
    """

    physical_to_logical: list[list[int]]
    logical_to_physical: list[list[list[int]]]
    counts: list[list[int]]


def balance_experts(loads: Sequence[Sequence[float]], replicas: int, groups: int, nodes: int, devices: int) -> Balance:
    """Plans every layer.

    Args:
        loads: ``[layers, experts]``, not negative. A layer without any load counts as one of equal loads.
        replicas: number of physical experts. If ``devices`` does not divide it, the first devices hold one more.
        groups: number of groups of consecutive experts in the model's router.
        nodes: number of machines, of consecutive devices. The plan is hierarchical if ``nodes`` divides ``groups`` and
            ``devices``, ``groups`` divides experts, and ``devices`` divides ``replicas``.
        devices: number of ranks that hold experts.

    Raises:
        ValueError: ``replicas`` are fewer than experts or devices, or more than there are if every device has all.
    """
    layers = [balance_layer(layer, replicas, groups, nodes, devices) for layer in loads]
    physical = [[*chain(*layer)] for layer in layers]
    of_logical: list[list[list[int]]] = [[[] for _ in layer] for layer in loads]
    for numbers, logical in zip(of_logical, physical, strict=True):
        for number, expert in enumerate(logical):
            numbers[expert].append(number)
    counts = [[len(numbers) for numbers in layer] for layer in of_logical]
    widest = max(chain(*counts), default=0)
    padded = [[numbers + [-1] * (widest - len(numbers)) for numbers in layer] for layer in of_logical]
    return Balance(physical, padded, counts)


def balance_layer(loads: Sequence[float], replicas: int, groups: int, nodes: int, devices: int) -> Bins:
    """The experts of each device, ascending; see :func:`balance_experts`."""
    experts = len(loads)
    if not max(experts, devices) <= replicas <= experts * devices:
        raise ValueError(
            f"{experts} experts on {devices} ranks have {max(experts, devices)} to {experts * devices} physical "
            f"experts, not {replicas}"
        )
    loads = [float(load) for load in loads] if any(loads) else [1.0] * experts
    divided = not any((groups % nodes, devices % nodes, experts % groups, replicas % devices))
    if not divided or replicas > experts * devices // nodes:
        groups = nodes = 1
    size, sizes = experts // groups, _sizes(replicas // nodes, devices // nodes)
    of_groups = [math.fsum(loads[group * size : (group + 1) * size]) for group in range(groups)]
    greedy = _packed(of_groups, list(range(groups)), [groups // nodes] * nodes)
    swapped = [node.copy() for node in greedy]
    _swap(swapped, of_groups)

    def plan(packed: Bins, published: bool = False) -> tuple[float, Bins]:
        within = [[group * size + i for group in node for i in range(size)] for node in packed]
        held = [*chain(*(_placed(loads, node, sizes, published) for node in within))]
        return imbalance(loads, held), held

    best = plan(swapped)
    if best[0] > 1 + _CLOSE and greedy != swapped:
        best = min(best, plan(greedy), key=lambda one: one[0])
    return min(best, plan(greedy, published=True), key=lambda one: one[0])[1]


def imbalance(loads: Sequence[float], held: Sequence[Sequence[int]]) -> float:
    """The largest load of a device over the mean; replicas of an expert have equal parts of its load.

    Args:
        loads: of each logical expert; 1 if there are none.
        held: the logical experts of each device.
    """
    shared = _shared(loads, held)
    largest = max(math.fsum(shared[expert] for expert in experts) for experts in held)
    total = math.fsum(loads)
    return largest * len(held) / total if total else 1.0


def _placed(loads: Sequence[float], experts: Sequence[int], sizes: Sequence[int], published: bool) -> Bins:
    """Steps 2 to 4: ``experts`` in devices of given sizes.

    Args:
        published: take steps 2 and 3 without a limit; a device may hold an expert twice.
    """
    more, mean = sum(sizes) - len(experts), math.fsum(loads[expert] for expert in experts) / len(sizes)
    best: tuple[float, Bins] | None = None
    for limit in _LIMITS[:1] if published or not more else _LIMITS:
        items = _replicated(loads, experts, more, more + 1 if published else len(sizes), limit * mean)
        counts = Counter(items)
        shared = [load / counts.get(expert, 1) for expert, load in enumerate(loads)]
        packed = _packed(shared, items, sizes, published)
        if not published:
            _swap(packed, shared)
        largest = max(math.fsum(shared[expert] for expert in one) for one in packed)
        if best is None or largest < best[0]:
            best = largest, packed
        if best[0] <= mean * (1 + _CLOSE):
            break
    assert best is not None
    return [sorted(one) for one in best[1]]


def _replicated(loads: Sequence[float], experts: Sequence[int], more: int, maximum: int, limit: float) -> list[int]:
    """The experts, then the experts of ``more`` replicas.

    Args:
        maximum: number of replicas of an expert.
        limit: load of a replica that is not divided further, unless all are as small.
    """
    counts = dict.fromkeys(experts, 1)

    def key(expert: int) -> tuple[int, float, int]:
        count = counts[expert]
        enough = count > 1 and loads[expert] <= limit * count
        return (count == maximum) * 2 + enough, -loads[expert] / count, expert

    heap = [key(expert) for expert in experts]
    heapify(heap)
    items = list(experts)
    for _ in range(more):
        items.append(expert := heap[0][2])
        counts[expert] += 1
        heapreplace(heap, key(expert))
    return items


def _packed(loads: Sequence[float], items: Sequence[int], sizes: Sequence[int], twice: bool = False) -> Bins:
    """Packs items (equal numbers are replicas) into bins of given sizes.

    Args:
        loads: of a single replica of each number.
        twice: whether a bin may have several replicas of an item.
    """
    bins: Bins = [[] for _ in sizes]
    total = [0.0] * len(sizes)
    room = [(0.0, i) for i, size in enumerate(sizes) if size]  # a heap: the bins that are not full
    for item in sorted(items, key=lambda item: -loads[item]):
        passed = []
        while room and not twice and item in bins[room[0][1]]:
            passed.append(heappop(room)[1])
        if room:
            chosen = heappop(room)[1]
        else:  # every bin with room has the item: a full one gives its smallest other item away
            chosen = min((i for i in range(len(sizes)) if item not in bins[i]), key=lambda i: (total[i], i))
            into = passed[0]
            other = min((one for one in bins[chosen] if one not in bins[into]), key=lambda one: (loads[one], one))
            bins[chosen].remove(other)
            bins[into].append(other)
            total[chosen] -= loads[other]
            total[into] += loads[other]
        bins[chosen].append(item)
        total[chosen] += loads[item]
        for i in (chosen, *passed):
            if len(bins[i]) < sizes[i]:
                heappush(room, (total[i], i))
    return bins


def _swap(bins: Bins, loads: Sequence[float]) -> None:
    """Step 4, in place. Every swap makes the largest load smaller, or fewer bins have it."""
    total = [math.fsum(loads[item] for item in one) for one in bins]
    while True:
        *others, top = sorted(range(len(bins)), key=lambda i: (total[i], i))
        swap = _best_swap(bins, loads, total, others, top)
        if swap is None:
            return
        other, given, taken = swap
        for one, old, new in ((top, given, taken), (other, taken, given)):
            bins[one][bins[one].index(old)] = new
            total[one] = math.fsum(loads[item] for item in bins[one])


def _best_swap(
    bins: Bins, loads: Sequence[float], total: Sequence[float], others: Sequence[int], top: int
) -> tuple[int, int, int] | None:
    """The bin, the item that it gets from the top bin, and the item that it gives; None: no swap helps."""
    best, swap = total[top] * (1 - 1e-9), None
    for other in others:
        gap = (total[top] - total[other]) / 2  # the best swap moves this much, so that both bins become equal
        even = total[other] + gap
        if even >= best:
            break  # later bins have more
        taken = [(loads[item], item) for item in bins[other] if item not in bins[top]]
        for one in bins[top]:
            wanted = loads[one] - gap
            for load, two in taken:
                largest = even + abs(wanted - load)
                if largest < best and one not in bins[other]:
                    best, swap = largest, (other, one, two)
    return swap


def _sizes(replicas: int, devices: int) -> list[int]:
    return [replicas // devices + (device < replicas % devices) for device in range(devices)]


def _shared(loads: Sequence[float], held: Sequence[Sequence[int]]) -> list[float]:
    """Load of each replica of every expert."""
    counts = [0] * len(loads)
    for expert in chain(*held):
        counts[expert] += 1
    return [load / count for load, count in zip(loads, counts, strict=True)]
