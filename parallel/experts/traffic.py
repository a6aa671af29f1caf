"""The bytes of each dispatch, counted without running it: its collectives as a log shows them (`collective_log.py`).

They follow from the number of tokens that each rank has for every rank and every machine. These are known if the
choices are, and expected if they are not (:func:`expected`).

A *rail* is a group with one rank of every machine (or more, where machines differ in size). By machine, a token travels
along its rail to each machine that serves it, and from there to the ranks that do.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from dsa_engine.parallel.collective_log import Collective, Kind
from dsa_engine.parallel.experts import DispatchMethod
from dsa_engine.parallel.links import Links


class RowBytes(NamedTuple):
    """Bytes of a token on its way to experts, with its choices and weights, and of a sum on its way back: in an
    all-to-all or along a rail (``back``), and in a reduce-scatter or inside a machine (``plain``)."""

    there: int
    back: int
    plain: int

    @classmethod
    def of(cls, token: int, choices: int, back: int | None = None, coded: int | None = None) -> RowBytes:
        """Rows of ``token`` bytes and so many choices, as `kernels/moe/pack_tokens.py` packs them.

        Args:
            back: bytes of a sum; default: ``token``.
            coded: bytes of a sum that travels as codes and scales; default: none does.
        """
        words, plain = -(-token // 4) + 2 * choices, token if back is None else back
        return cls(-(-words // 4) * 16, plain if coded is None else coded, plain)


def quantized_bytes(hidden: int) -> int:
    """Bytes of a token on its way to FP8 experts, and of a sum that comes back so: codes, and a scale for each 128
    (`quantize.py`)."""
    return hidden + 4 * -(-hidden // 128)


class Routing(NamedTuple):
    """A token's choices: ``top_k`` different experts, evenly out of ``top_groups`` of ``groups`` equal groups."""

    top_k: int
    groups: int = 1
    top_groups: int = 1


class Tokens(NamedTuple):
    """Tokens of every rank: all of them, those for each rank ``[from][to]`` and for each machine ``[from][machine]``.

    A token counts once for a rank, or a machine, that serves several of its choices.
    """

    counts: Sequence[float]
    ranks: Sequence[Sequence[float]]
    machines: Sequence[Sequence[float]]


def rails_of(machines: Sequence[int]) -> list[list[int]]:
    """The ranks of each rail: there are as many rails as the smallest machine has ranks, and each machine has a rank in
    every rail."""
    return [[*rail] for rail in _rails(tuple(machines))]


@lru_cache(maxsize=64)
def _rails(machines: tuple[int, ...]) -> list[list[int]]:
    count = min(Counter(machines).values())
    taken: Counter[int] = Counter()
    rails: list[list[int]] = [[] for _ in range(count)]
    for rank, machine in enumerate(machines):
        rails[taken[machine] % count].append(rank)
        taken[machine] += 1
    return rails


def largest_groups(machines: Sequence[int]) -> tuple[int, int]:
    """Number of ranks of the largest rail, and of the largest machine."""
    return max(map(len, rails_of(machines))), max(Counter(machines).values())


def peers_of(rank: int, machines: Sequence[int]) -> dict[int, int]:
    """By machine, the rank that takes the tokens of ``rank`` there: one of its rail; ``rank`` itself at home."""
    (rail,) = [rail for rail in _rails(tuple(machines)) if rank in rail]
    home = [one for one in rail if machines[one] == machines[rank]].index(rank)
    peers = {}
    for machine in set(machines):
        there = [one for one in rail if machines[one] == machine]
        peers[machine] = there[home % len(there)]
    return peers | {machines[rank]: rank}


def has_two_levels(machines: Sequence[int]) -> bool:
    """Whether there are several machines, one of them with several ranks. Else a dispatch by machine is an
    all-to-all."""
    return 1 < len(set(machines)) < len(machines)


def are_equal_neighbours(machines: Sequence[int]) -> bool:
    """Whether there are two levels, and machines have equally many ranks, one machine after the other."""
    equal = len(set(Counter(machines).values())) == 1
    return has_two_levels(machines) and equal and list(machines) == sorted(machines)


@lru_cache(maxsize=64)
def largest_part(machines: tuple[int, ...]) -> int:
    """The largest part of a rank, in bytes, that all ranks gather faster along rails and then inside machines than in
    one ring; 0: none. By the modelled :class:`.links.Links`; rails take fewer steps and carry a byte for longer."""
    if not are_equal_neighbours(machines):
        return 0
    links, parts = Links(), (0, 1 << 20)
    gains = []
    for part in parts:
        ring, two_levels = (
            sum(links.seconds(one, machines) for one in _of_all("all_gather", machines, 0, part, limit))
            for limit in (-1, part)
        )
        gains.append(ring - two_levels)
    a_byte = (gains[0] - gains[1]) / parts[1]
    return 0 if gains[0] <= 0 else sys.maxsize if a_byte <= 0 else int(gains[0] / a_byte)


def expected(
    held: Sequence[Sequence[int]], machines: Sequence[int], routing: Routing, counts: Sequence[float]
) -> Tokens:
    """The expected tokens, if each rank has ``counts`` of them and routing is even.

    Args:
        held: the logical experts of every rank; replicas share an expert's tokens.
    """
    experts = 1 + max(max(one) for one in held)
    replicas = Counter(expert for one in held for expert in one)

    def reached(ranks: Sequence[int]) -> float:
        weights = [0.0] * experts
        for rank in ranks:
            for expert in held[rank]:
                weights[expert] += 1 / replicas[expert]
        return reached_part(weights, routing)

    by_rank = [reached([rank]) for rank in range(len(held))]
    numbers = range(1 + max(machines))
    by_machine = [reached([r for r, machine in enumerate(machines) if machine == number]) for number in numbers]
    return Tokens(counts, [[n * p for p in by_rank] for n in counts], [[n * p for p in by_machine] for n in counts])


def reached_part(weights: Sequence[float], routing: Routing) -> float:
    """The part of all tokens that choose at least one of a set of experts.

    Only sums, products and quotients are taken, so that all processors give the same bits.

    Args:
        weights: the part of each expert that is in the set. Experts that no group has, as a routed shared expert, are
            chosen by every token.
    """
    k, groups, top_groups = routing
    size = len(weights) // groups
    if any(weights[size * groups :]):
        return 1.0
    chosen = top_groups * size
    sets = {(0, 0.0): 1}  # by number of groups and weight of their experts: the number of sets of groups
    for group in range(groups):
        weight = sum(weights[group * size : (group + 1) * size])
        for (number, total), ways in list(sets.items()):
            if number < top_groups:
                key = number + 1, total + weight
                sets[key] = sets.get(key, 0) + ways
    missed, ways_of_all = 0.0, 0
    for (number, total), ways in sets.items():
        if number == top_groups:
            part = 1.0
            for i in range(min(k, chosen)):
                part *= max(0.0, chosen - total - i) / (chosen - i)
            missed += ways * part
            ways_of_all += ways
    return 1.0 - missed / ways_of_all


def collectives(
    method: DispatchMethod, tokens: Tokens, machines: Sequence[int], row: RowBytes, rank: int
) -> list[Collective]:
    """The collectives of a dispatch in one round and of the way back, as ``rank`` sees them, in their order.

    Further rounds send the same rows in parts, after another exchange of counts.
    """
    size = len(machines)
    world = range(size)
    if method == "all_gather":
        rows = max(tokens.counts)
        gathered = gathered_parts("all_gather", machines, rank, rows * row.there)
        return [*gathered, *gathered_parts("reduce_scatter", machines, rank, rows * row.plain)]
    if method == "all_to_all" or not has_two_levels(machines):
        counts = gathered_parts("all_gather", machines, rank, 8 * size)
        sent, received = tokens.ranks[rank], [of[rank] for of in tokens.ranks]
        return [*counts, *_there_and_back(world, rank, sent, received, row.there, row.back)]
    home = machines[rank]
    (rail,) = [rail for rail in rails_of(machines) if rank in rail]
    inside = [one for one in world if machines[one] == home]
    peers = {one: peers_of(one, machines) for one in world}
    mine = {peer: tokens.machines[rank][machine] for machine, peer in peers[rank].items()}
    there, home_again = _there_and_back(
        rail,
        rank,
        [mine.get(one, 0) for one in rail],
        [tokens.machines[one][home] if peers[one][home] == rank else 0 for one in rail],
        row.there,
        row.back,
    )
    passed = {
        taker: [sum(tokens.ranks[one][to] for one in world if peers[one][home] == taker) for to in inside]
        for taker in inside
    }
    taken = [passed[one][inside.index(rank)] for one in inside]
    into, out = _there_and_back(inside, rank, passed[rank], taken, row.there, row.plain)
    return [*gathered_parts("all_gather", machines, rank, 16 * size), there, into, out, home_again]


def gathered_parts(kind: Kind, machines: Sequence[int], rank: int, part: float) -> list[Collective]:
    """An all-gather or reduce-scatter of parts of all ranks, in one level or in two (:func:`largest_part`)."""
    return _of_all(kind, machines, rank, part, largest_part(tuple(machines)))


def _of_all(kind: Kind, machines: Sequence[int], rank: int, part: float, limit: int) -> list[Collective]:
    if part > limit or limit == 0 < part:
        return [_even(kind, range(len(machines)), rank, part)]
    (rail,) = [rail for rail in rails_of(machines) if rank in rail]
    inside = [one for one, machine in enumerate(machines) if machine == machines[rank]]
    both = [_even(kind, rail, rank, part), _even(kind, inside, rank, part * len(rail))]
    return both if kind == "all_gather" else both[::-1]


def _even(kind: Kind, ranks: Sequence[int], rank: int, part: float) -> Collective:
    nbytes = tuple(0 if one == rank else round(part) for one in ranks)
    return Collective(kind, tuple(ranks), ranks.index(rank), nbytes, nbytes)


def _there_and_back(
    ranks: Sequence[int], rank: int, sent: Sequence[float], received: Sequence[float], there: int, back: int
) -> tuple[Collective, Collective]:
    index = ranks.index(rank)

    def nbytes(rows: Sequence[float], each: int) -> tuple[int, ...]:
        return tuple(0 if i == index else round(n * each) for i, n in enumerate(rows))

    tokens = Collective("all_to_all", tuple(ranks), index, nbytes(sent, there), nbytes(received, there))
    sums = Collective("all_to_all", tuple(ranks), index, nbytes(received, back), nbytes(sent, back))
    return tokens, sums
