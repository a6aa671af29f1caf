"""The dispatch that a step takes by itself: the one with the shortest modelled exchange (``moe_dispatch="auto"``)."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from dsa_engine.parallel.experts import DispatchMethod
from dsa_engine.parallel.experts.traffic import Routing, RowBytes, collectives, expected, has_two_levels
from dsa_engine.parallel.links import Links

logger = logging.getLogger(__name__)


class DispatchChoice:
    """Chooses a dispatch by the size of a step. All ranks know what the choice depends on, so they choose the same.

    Sizes count in classes, up to a power of two. The model assumes even routing, the links of :class:`.links.Links`,
    and as many tokens on every rank as the fullest has.

    Args:
        machines: the machine of each rank.
        logs: whether this rank logs each choice.
    """

    def __init__(self, machines: Sequence[int], logs: bool = False, links: Links | None = None):
        self._machines, self._logs, self._links = machines, logs, links or Links()
        self._chosen: dict[tuple[int, int, RowBytes, Routing], DispatchMethod] = {}

    def method(
        self, tokens: int, max_pairs: int, row: RowBytes, routing: Routing, held: Sequence[Sequence[int]]
    ) -> DispatchMethod:
        """The dispatch of a step.

        Args:
            tokens: the largest token count of a rank.
            max_pairs: bound on the token-expert pairs of a round. "all_gather" is chosen only if no more tokens meet on
                a rank, so that it takes no more memory than the others may.
            held: the experts of each rank; a placement that changes later does not change what has been chosen.
        """
        key = 1 << max(0, tokens - 1).bit_length(), max_pairs, row, routing
        if key not in self._chosen:
            self._chosen[key] = self._choose(*key, held)
        return self._chosen[key]

    def seconds(
        self, tokens: int, row: RowBytes, routing: Routing, held: Sequence[Sequence[int]]
    ) -> dict[DispatchMethod, float]:
        """Modelled seconds of each dispatch on the way to experts and back: of the slowest among the first ranks of the
        machines. The host's wait for counts is not modelled."""
        machines = self._machines
        reached = expected(held, machines, routing, [tokens] * len(machines))
        methods: list[DispatchMethod] = ["all_gather", "all_to_all"]
        if has_two_levels(machines):
            methods.append("by_machine")
        firsts = sorted({machines.index(machine) for machine in machines})

        def of(method: DispatchMethod, rank: int) -> float:
            return sum(self._links.seconds(one, machines) for one in collectives(method, reached, machines, row, rank))

        return {method: max(of(method, rank) for rank in firsts) for method in methods}

    def _choose(
        self, tokens: int, max_pairs: int, row: RowBytes, routing: Routing, held: Sequence[Sequence[int]]
    ) -> DispatchMethod:
        seconds = self.seconds(tokens, row, routing, held)
        if tokens * len(self._machines) > max_pairs:
            del seconds["all_gather"]
        best = min(seconds, key=lambda method: seconds[method])
        if self._logs:
            times = ", ".join(f"{method} {1e6 * one:.0f} µs" for method, one in seconds.items())
            logger.info("dispatch of at most %s tokens a rank: %s (modelled: %s)", f"{tokens:,}", best, times)
        return best
