"""How the tokens of a MoE layer travel to their experts and back, by dispatch."""

from __future__ import annotations

import math
from functools import lru_cache

from dsa_engine.commands.planner.choices import DISPATCHES
from dsa_engine.config.model import ModelConfig
from dsa_engine.measure.costs.batch_schedule import Exchange, Legs
from dsa_engine.parallel.collective_log import Collective, Kind
from dsa_engine.parallel.experts.placement import contiguous
from dsa_engine.parallel.experts.traffic import Routing, RowBytes, gathered_parts, quantized_bytes, reached_part
from dsa_engine.parallel.links import Links, Transfer


class ExpertExchange:
    """The exchange of one rank of ``ranks``, all with as many rows.

    Args:
        narrow: tokens travel as 8-bit codes with scales.
        narrow_sums: sums come back so too, in an all-to-all or along a rail; else in bfloat16.
        imbalance: token-expert pairs of the busiest rank over the mean.
    """

    def __init__(
        self,
        config: ModelConfig,
        links: Links,
        ranks: int,
        narrow: bool = False,
        imbalance: float = 1.0,
        narrow_sums: bool = False,
    ):
        self.config, self.links, self.ranks, self.narrow = config, links, ranks, narrow
        self.imbalance = imbalance
        hidden = config.hidden_size
        sent = quantized_bytes(hidden) if narrow else 2 * hidden
        coded = quantized_bytes(hidden) if narrow_sums else None
        self._rows = RowBytes.of(sent, config.num_experts_per_tok, 2 * hidden, coded)

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
        return min(DISPATCHES, key=lambda one: self.seconds(one, rows))

    def seconds(self, dispatch: str, rows: float) -> float:
        """Seconds of a layer's way there and back, if nothing else travels."""
        exchange = self.of(dispatch, rows)
        return exchange.dispatch + exchange.combine

    def of(self, dispatch: str, rows: float) -> Exchange:
        """A layer's exchange with ``rows`` rows of each rank; nothing with one rank."""
        if self.ranks == 1 or not rows:
            return Exchange()
        dispatch = self.method(dispatch, rows)
        if dispatch == "all_gather":
            there, back = rows * self._rows.there, rows * self._rows.plain
            return Exchange(there=self._gathered("all_gather", there), back=self._gathered("reduce_scatter", back))
        if dispatch == "by_machine" and self.machines > 1:
            return self._by_machine(rows)
        part = min(rows, rows * self.reached(self.ranks) * self.imbalance)
        counts = self._gathered("all_gather", 8 * self.ranks)  # tokens and choices for each rank
        ways = (even_transfer("all_to_all", self.ranks, round(part * row), self.links) for row in self._rows[:2])
        return Exchange(counts, *(Legs(everyone=way) for way in ways))

    def reached(self, parts: int) -> float:
        """The part of all tokens that chooses an expert of one of ``parts`` equal parts of consecutive experts."""
        return _reached(self.config, parts)

    def _gathered(self, kind: Kind, part: float) -> Legs:
        """An all-gather or reduce-scatter over all ranks, in one level or in two as the engine has it."""
        return _gathered_legs(kind, self.ranks, round(part), self.links)

    def _by_machine(self, rows: float) -> Exchange:
        """To the rank of the same number on each machine with an expert of the token, and on to the experts' ranks."""
        row = self._rows
        counts = self._gathered("all_gather", 16 * self.ranks)  # tokens and choices for each rank, on both levels
        on_machine = rows * self.machines * self.reached(self.machines)  # tokens that a rank of a machine passes on
        crossing = rows * self.reached(self.machines)
        forwarded = min(on_machine, rows * self.machines * self.reached(self.ranks) * self.imbalance)

        def way(crossed: int, passed: int) -> Legs:
            rail = _transfer("all_to_all", self.machines, round(crossing * crossed), self.links, 1)
            size = self.links.machine_size
            return Legs(rail=rail, machine=_transfer("all_to_all", size, round(forwarded * passed), self.links, size))

        return Exchange(counts, way(row.there, row.there), way(row.back, row.plain))


@lru_cache(maxsize=1024)
def _reached(config: ModelConfig, parts: int) -> float:
    held = contiguous(config.n_routed_experts, parts)[0]
    weights = [float(expert in held) for expert in range(config.n_routed_experts)]
    return reached_part(weights, Routing(config.num_experts_per_tok, config.n_group, config.topk_group))


def even_seconds(kind: Kind, size: int, part: int, links: Links) -> float:
    """Seconds of :func:`even_transfer`."""
    return even_transfer(kind, size, part, links).seconds


def even_transfer(kind: Kind, size: int, part: int, links: Links) -> Transfer:
    """A collective over ``size`` neighbouring ranks, ``part`` bytes from each; to each in an all-to-all."""
    return _transfer(kind, size, part, links, links.machine_size)


@lru_cache(maxsize=65536)
def _gathered_legs(kind: Kind, ranks: int, part: int, links: Links) -> Legs:
    machines = [rank // links.machine_size for rank in range(ranks)]
    legs = [links.transfer(one, machines) for one in gathered_parts(kind, machines, 0, part)]
    if len(legs) == 1:
        return Legs(everyone=legs[0])
    rail, machine = legs if kind == "all_gather" else legs[::-1]
    return Legs(rail=rail, machine=machine)


@lru_cache(maxsize=65536)
def _transfer(kind: Kind, size: int, part: int, links: Links, on_machine: int) -> Transfer:
    """The same with ``on_machine`` of the ranks on each machine."""
    counts = (0, *(part,) * (size - 1))
    machines = [rank // on_machine for rank in range(size)]
    return links.transfer(Collective(kind, tuple(range(size)), 0, counts, counts), machines)
