"""The dispatch that a step takes by itself: the one with the shortest modelled exchange (``moe_dispatch="auto"``)."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from dsa_engine.parallel.experts import DispatchMethod
from dsa_engine.parallel.experts.rails import has_two_levels
from dsa_engine.parallel.experts.traffic import Routing, RowBytes, exchange
from dsa_engine.parallel.links import Links

logger = logging.getLogger(__name__)


class DispatchChoice:
    """Chooses a dispatch by the size of a step. All ranks know what the choice depends on, so they choose the same.

    Sizes count in classes, up to a power of two. The model assumes even routing, the links of :class:`.links.Links`,
    nodes of equal size, and as many tokens on every rank as the fullest has. The host's wait for counts isn't modelled.

    Args:
        nodes: the node of each rank.
        logs: whether this rank logs each choice.
    """

    def __init__(self, nodes: Sequence[int], logs: bool = False, links: Links | None = None):
        self._ranks, self._nodes = len(nodes), len(set(nodes))
        self._logs, self._links = logs, links or Links()
        self._methods: list[DispatchMethod] = ["all_gather", "all_to_all"]
        if has_two_levels(nodes):
            self._methods.append("by_node")
        self._chosen: dict[tuple[int, int, RowBytes, Routing], DispatchMethod] = {}

    def method(self, tokens: int, max_pairs: int, row: RowBytes, routing: Routing) -> DispatchMethod:
        """The dispatch of a step.

        Args:
            tokens: the largest token count of a rank.
            max_pairs: bound on the token-expert pairs of a round. "all_gather" is chosen only if no more tokens meet on
                a rank, so that it takes no more memory than the others may.
        """
        key = 1 << max(0, tokens - 1).bit_length(), max_pairs, row, routing
        if key not in self._chosen:
            self._chosen[key] = self._choose(*key)
        return self._chosen[key]

    def seconds(self, tokens: int, row: RowBytes, routing: Routing) -> dict[DispatchMethod, float]:
        """Modelled seconds of each dispatch on the way to experts and back."""
        sizes = tokens, self._ranks, self._nodes
        return {method: exchange(method, *sizes, row, routing, self._links).seconds for method in self._methods}

    def _choose(self, tokens: int, max_pairs: int, row: RowBytes, routing: Routing) -> DispatchMethod:
        seconds = self.seconds(tokens, row, routing)
        if tokens * self._ranks > max_pairs:
            del seconds["all_gather"]
        best = min(seconds, key=lambda method: seconds[method])
        if self._logs:
            times = ", ".join(f"{method} {1e6 * one:.0f} µs" for method, one in seconds.items())
            logger.info("dispatch of at most %s tokens a rank: %s (modelled: %s)", f"{tokens:,}", best, times)
        return best
