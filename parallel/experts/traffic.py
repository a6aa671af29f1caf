"""The exchange of a MoE layer, as modelled: bytes of a row, tokens by even routing, seconds of each dispatch."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from dsa_engine.parallel.experts import DispatchMethod
from dsa_engine.parallel.links import Links


class RowBytes(NamedTuple):
    """Bytes of a token on its way to experts, with its choices and weights, and of a sum on its way back: in an
    all-to-all or along a rail (``back``), and in a reduce-scatter or inside a node (``plain``)."""

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
    """A token's choices: ``top_k`` of ``experts``, evenly out of ``top_groups`` of ``groups`` equal groups."""

    experts: int
    top_k: int
    groups: int = 1
    top_groups: int = 1

    def reached(self, parts: int) -> float:
        """The part of all tokens that choose an expert of one of ``parts`` equal parts of consecutive experts."""
        return _reached(self, parts)


@lru_cache(maxsize=1024)
def _reached(routing: Routing, parts: int) -> float:
    each = routing.experts / parts
    return reached_part([min(1.0, max(0.0, each - expert)) for expert in range(routing.experts)], routing)


def reached_part(weights: Sequence[float], routing: Routing) -> float:
    """The part of all tokens that choose at least one of a set of experts.

    Only sums, products and quotients are taken, so that all processors give the same bits.

    Args:
        weights: the part of each expert that is in the set. Experts that no group has, as a routed shared expert, are
            chosen by every token.
    """
    _, k, groups, top_groups = routing
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


class Exchange(NamedTuple):
    """Seconds of a layer's way to the experts, with the exchange of counts, and back, if nothing else travels."""

    there: float = 0.0
    back: float = 0.0

    @property
    def seconds(self) -> float:
        return self.there + self.back


def exchange(
    method: DispatchMethod, rows: float, ranks: int, nodes: int, row: RowBytes, routing: Routing, links: Links
) -> Exchange:
    """The exchange of ``rows`` tokens of each rank, in one round, with even routing and consecutive experts."""
    if ranks == 1:
        return Exchange()
    if method == "all_gather":
        there, back = (gathered(links, ranks, nodes, rows * nbytes) for nbytes in (row.there, row.plain))
        return Exchange(there, back)
    to_rank = rows * routing.reached(ranks)
    if method == "all_to_all" or not 1 < nodes < ranks:
        there, back = (links.all_to_all(ranks, nodes, to_rank * nbytes) for nbytes in (row.there, row.back))
        return Exchange(gathered(links, ranks, nodes, 8 * ranks) + there, back)
    to_node, passed_on = rows * routing.reached(nodes), nodes * to_rank
    there, back = (
        links.all_to_all(nodes, nodes, to_node * rail) + links.all_to_all(ranks // nodes, 1, passed_on * inside)
        for rail, inside in ((row.there, row.there), (row.back, row.plain))
    )
    return Exchange(gathered(links, ranks, nodes, 16 * ranks) + there, back)


def gathered(links: Links, ranks: int, nodes: int, part: float) -> float:
    """Seconds of an all-gather or a reduce-scatter over all ranks, in one ring, or in two levels where the engine takes
    these."""
    if 1 < nodes < ranks and part <= largest_part(ranks, nodes):
        return _in_two_levels(links, ranks, nodes, part)
    return links.ring(ranks, nodes, part)


@lru_cache(maxsize=64)
def largest_part(ranks: int, nodes: int) -> int:
    """The largest part of a rank, in bytes, that all ranks gather faster along rails and then inside nodes than in one
    ring; 0: none. By the default :class:`.links.Links`; rails take fewer steps and carry a byte for longer."""
    links, mebi = Links(), 1 << 20
    gain, of_mebi = (links.ring(ranks, nodes, b) - _in_two_levels(links, ranks, nodes, b) for b in (0, mebi))
    if gain <= 0:
        return 0
    return sys.maxsize if of_mebi >= gain else int(gain / (gain - of_mebi) * mebi)


def _in_two_levels(links: Links, ranks: int, nodes: int, part: float) -> float:
    return links.ring(nodes, nodes, part) + links.ring(ranks // nodes, 1, part * nodes)
