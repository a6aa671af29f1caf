"""The exchange of a MoE layer, as modelled: bytes of a row, tokens by even routing, seconds of each dispatch; and the
dispatch that a step takes by it (``moe_dispatch="auto"``)."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import NamedTuple

from dsa_engine.kernels.runtime.integers import cdiv
from dsa_engine.parallel.experts import DispatchMethod
from dsa_engine.parallel.experts.placement import has_two_levels
from dsa_engine.parallel.links import Links

logger = logging.getLogger(__name__)


class RowBytes(NamedTuple):
    """Bytes of a token on its way to experts, with its top-k ids and weights, and of a sum on its way back: in an
    all-to-all or along a rail (``back``), and in a reduce-scatter or inside a node (``plain``)."""

    there: int
    back: int
    plain: int

    @classmethod
    def of(cls, token: int, top_k: int, back: int | None = None, quantized: int | None = None) -> RowBytes:
        """Rows of ``token`` bytes with ``top_k`` experts, as `kernels/moe/pack_tokens.py` packs them; ``back``: bytes
        of a sum, by default ``token``; ``quantized``: those of a sum as codes and scales, by default none."""
        words, plain = cdiv(token, 4) + 2 * top_k, token if back is None else back
        return cls(cdiv(words, 4) * 16, plain if quantized is None else quantized, plain)


def quantized_bytes(hidden: int, block: int = 128) -> int:
    """Bytes of a token on its way to experts that multiply codes, and of a sum that comes back so: codes, and a scale
    for each ``block`` of them: 128 in FP8 (`quantize.py`), a whole token in INT8 (`int8.py`)."""
    return hidden + 4 * cdiv(hidden, block)


class RouterShape(NamedTuple):
    """A token's experts: ``top_k`` of ``experts``, evenly out of ``top_groups`` of ``groups`` equal groups."""

    experts: int
    top_k: int
    groups: int = 1
    top_groups: int = 1

    def reached(self, parts: int) -> float:
        """The part of all tokens that choose an expert of one of ``parts`` equal parts of consecutive experts. A part
        counts as lying in one group, or as holding whole groups."""
        size, own = self.experts // self.groups, self.experts / parts
        held = max(1, min(self.groups, round(own / size)))  # groups of the part
        each, chosen = min(own / held, size), self.top_groups * size
        missed = 0.0
        for met in range(min(held, self.top_groups) + 1):
            none = 1.0  # the part of the choices that miss its experts in ``met`` groups
            for i in range(min(self.top_k, chosen)):
                none *= max(0.0, chosen - met * each - i) / (chosen - i)
            missed += math.comb(held, met) * math.comb(self.groups - held, self.top_groups - met) * none
        return 1.0 - missed / math.comb(self.groups, self.top_groups)


def exchange(
    method: DispatchMethod, rows: float, ranks: int, nodes: int, row: RowBytes, routing: RouterShape, links: Links
) -> float:
    """Seconds of a layer's way to the experts, with the exchange of counts, and back, for ``rows`` tokens of each rank,
    in one round, with even routing and consecutive experts, if nothing else travels."""
    if ranks == 1:
        return 0.0
    if method == "all_gather":
        return sum(links.ring(ranks, nodes, rows * nbytes) for nbytes in (row.there, row.plain))
    to_rank = rows * routing.reached(ranks)
    if method == "all_to_all" or not 1 < nodes < ranks:
        ways = sum(links.all_to_all(ranks, nodes, to_rank * nbytes) for nbytes in (row.there, row.back))
        return links.ring(ranks, nodes, 8 * ranks) + ways
    to_node, passed_on = rows * routing.reached(nodes), nodes * to_rank
    ways = links.ring(ranks, nodes, 16 * ranks)
    for rail, inside in ((row.there, row.there), (row.back, row.plain)):
        ways += links.all_to_all(nodes, nodes, to_node * rail)
        ways += links.all_to_all(ranks // nodes, 1, passed_on * inside)
    return ways


class DispatchChoice:
    """Chooses a dispatch by the size of a step. All ranks know what the choice depends on, so they choose the same.

    Sizes count in classes, up to a power of two. The model assumes even routing, the links of :class:`.links.Links`,
    nodes of equal size, and as many tokens on every rank as the fullest has. The host's wait for counts isn't modelled.
    """

    def __init__(self, nodes: Sequence[int], logs: bool = False, links: Links | None = None):
        self._ranks, self._nodes = len(nodes), len(set(nodes))
        self._logs, self._links = logs, links or Links()
        self._methods: list[DispatchMethod] = ["all_gather", "all_to_all"]
        if has_two_levels(nodes):
            self._methods.append("by_node")
        self._chosen: dict[tuple[int, int, RowBytes, RouterShape], DispatchMethod] = {}

    def method(self, tokens: int, max_pairs: int, row: RowBytes, routing: RouterShape) -> DispatchMethod:
        """The dispatch of a step, by the largest token count of a rank. "all_gather" is chosen only if no more tokens
        meet on a rank than a round may have pairs, so that it takes no more memory than the others may."""
        key = 1 << max(0, tokens - 1).bit_length(), max_pairs, row, routing
        if key not in self._chosen:
            seconds = self._ranked(*key)
            best = self._chosen[key] = next(iter(seconds))
            if self._logs:
                times = ", ".join(f"{method} {1e6 * one:.0f} µs" for method, one in seconds.items())
                logger.info("dispatch of at most %s tokens a rank: %s (modelled: %s)", f"{key[0]:,}", best, times)
        return self._chosen[key]

    def is_new(self, tokens: int) -> bool:
        """Whether a step with so many tokens on a rank would take a dispatch that none has, in the layers so far."""
        layers, size = {key[1:] for key in self._chosen}, 1 << max(0, tokens - 1).bit_length()
        return any(next(iter(self._ranked(size, *layer))) not in self._chosen.values() for layer in layers)

    def seconds(self, tokens: int, row: RowBytes, routing: RouterShape) -> dict[DispatchMethod, float]:
        """Modelled seconds of each dispatch on the way to experts and back."""
        sizes = tokens, self._ranks, self._nodes
        return {method: exchange(method, *sizes, row, routing, self._links) for method in self._methods}

    def _ranked(self, tokens: int, max_pairs: int, row: RowBytes, routing: RouterShape) -> dict[DispatchMethod, float]:
        """Modelled seconds of each dispatch that a step may take, the shortest first."""
        seconds = self.seconds(tokens, row, routing)
        if tokens * self._ranks > max_pairs:
            del seconds["all_gather"]
        return dict(sorted(seconds.items(), key=lambda one: one[1]))
