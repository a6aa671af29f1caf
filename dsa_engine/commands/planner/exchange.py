"""Seconds in which the tokens of a MoE layer travel to their experts and back, by dispatch."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

from dsa_engine.commands.planner.choices import DISPATCHES
from dsa_engine.config.model import ModelConfig
from dsa_engine.parallel.collective_log import Collective, Kind
from dsa_engine.parallel.links import Links

_SCALED = 128  # numbers of a token with one scale, float32


class Exchange(NamedTuple):
    """Seconds of a MoE layer's way to the experts and back."""

    dispatch: float
    combine: float


class ExpertExchange:
    """The exchange of one rank of ``ranks``, all with as many rows.

    Args:
        narrow: tokens travel as 8-bit codes with scales; sums come back in bfloat16.
        two_levels: gathers and their sums pass between machines first, then inside them, where that is faster.
        imbalance: token-expert pairs of the busiest rank over the mean.
    """

    def __init__(
        self,
        config: ModelConfig,
        links: Links,
        ranks: int,
        narrow: bool = False,
        two_levels: bool = False,
        imbalance: float = 1.0,
    ):
        self.config, self.links, self.ranks, self.narrow = config, links, ranks, narrow
        self.two_levels, self.imbalance = two_levels, imbalance
        hidden = config.hidden_size
        choices = 8 * config.num_experts_per_tok
        there = (hidden + 4 * math.ceil(hidden / _SCALED) if narrow else 2 * hidden) + choices  # bytes of a token
        self._rows = (there, 2 * hidden)

    @property
    def machines(self) -> int:
        return math.ceil(self.ranks / self.links.machine_size)

    def method(self, dispatch: str, rows: float, static: bool = False) -> str:
        """The dispatch that is taken: "auto" is the one with the shortest exchange, if ``static`` of those whose sizes
        do not depend on the routing, as CUDA graphs need them."""
        if dispatch != "auto":
            return dispatch
        if static:
            return "all_gather"
        return min(DISPATCHES, key=lambda one: sum(self.seconds(one, rows)))

    def seconds(self, dispatch: str, rows: float) -> Exchange:
        """Seconds of a layer with ``rows`` rows of each rank; 0 with one rank."""
        if self.ranks == 1 or not rows:
            return Exchange(0.0, 0.0)
        dispatch = self.method(dispatch, rows)
        there: float
        back: float
        if dispatch == "all_gather":
            there, back = self._rows
            return Exchange(self._gather("all_gather", rows * there), self._gather("reduce_scatter", rows * back))
        if dispatch == "by_machine" and self.machines > 1:
            return self._by_machine(rows)
        part = min(rows, rows * self.reached(self.ranks) * self.imbalance)
        counts = even_seconds("all_gather", self.ranks, 8 * self.ranks, self.links)  # tokens and choices for each rank
        there, back = (even_seconds("all_to_all", self.ranks, round(part * row), self.links) for row in self._rows)
        return Exchange(there + counts, back)

    def reached(self, parts: int) -> float:
        """The part of all tokens that has chosen an expert of one of ``parts`` equal parts of consecutive experts.

        A token takes its experts evenly from ``topk_group`` of the router's ``n_group`` groups.
        """
        c = self.config
        groups, chosen = (c.n_group, c.topk_group) if c.n_group > 1 else (1, 1)
        held: float = groups / parts  # groups in a part
        if held <= 1:
            return chosen / groups * (1 - (1 - held / chosen) ** c.num_experts_per_tok)
        whole, missed = round(held), 0.0
        for hit in range(min(whole, chosen) + 1):
            ways = math.comb(whole, hit) * math.comb(groups - whole, chosen - hit) / math.comb(groups, chosen)
            missed += ways * (1 - hit / chosen) ** c.num_experts_per_tok
        return 1 - missed

    def _by_machine(self, rows: float) -> Exchange:
        """To the rank of the same number on each machine with an expert of the token, and on to the experts' ranks."""
        across, inside = self._rail
        counts = even_seconds("all_gather", self.ranks, 8 * self.ranks, self.links)
        on_machine = rows * self.machines * self.reached(self.machines)  # tokens that a rank of a machine passes on
        crossing = rows * self.reached(self.machines)
        forwarded = min(on_machine, rows * self.machines * self.reached(self.ranks) * self.imbalance)
        there, back = (
            _seconds("all_to_all", self.machines, round(crossing * row), self.links, across)
            + _seconds("all_to_all", self.links.machine_size, round(forwarded * row), self.links, inside)
            for row in self._rows
        )
        return Exchange(there + counts, back)

    @property
    def _rail(self) -> tuple[int, int]:
        return 1, self.links.machine_size

    def _gather(self, kind: Kind, part: float) -> float:
        flat = even_seconds(kind, self.ranks, round(part), self.links)
        if not self.two_levels or self.machines == 1:
            return flat
        across, inside = self._rail
        between = _seconds(kind, self.machines, round(part), self.links, across)
        within = _seconds(kind, self.links.machine_size, round(part * self.machines), self.links, inside)
        return min(flat, between + within)


def even_seconds(kind: Kind, size: int, part: int, links: Links) -> float:
    """Seconds of a collective over ``size`` neighbouring ranks, ``part`` bytes from each; to each in an all-to-all."""
    return _seconds(kind, size, part, links, links.machine_size)


@lru_cache(maxsize=65536)
def _seconds(kind: Kind, size: int, part: int, links: Links, on_machine: int) -> float:
    """The same with ``on_machine`` of the ranks on each machine."""
    counts = (0, *(part,) * (size - 1))
    machines = [rank // on_machine for rank in range(size)]
    return links.seconds(Collective(kind, tuple(range(size)), 0, counts, counts), machines)
