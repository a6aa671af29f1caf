"""The experts of all layers: the placement of each, consecutive or a plan by loads and with replicas, and what a mesh
makes of them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch

from dsa_engine.parallel.experts.balance import balance_layer, imbalance
from dsa_engine.parallel.experts.by_node import NodeGroups
from dsa_engine.parallel.experts.counts import ExpertCounts
from dsa_engine.parallel.experts.deep_ep import DeepEP
from dsa_engine.parallel.experts.expert_parallel import ExpertParallel
from dsa_engine.parallel.experts.movement import with_fewest_moves
from dsa_engine.parallel.experts.placement import ExpertPlacement, Held, contiguous
from dsa_engine.parallel.experts.traffic import DispatchChoice
from dsa_engine.parallel.group import Group
from dsa_engine.parallel.side_stream import SideStream

if TYPE_CHECKING:
    from dsa_engine.parallel.config import ParallelConfig

_GAIN = 0.02  # experts move if the largest load of a rank falls by at least this part of the mean


class LayerPlacements:
    """Makes placements; the same on every rank.

    Args:
        ranks: number of ranks that hold experts.
        nodes: number of nodes that groups of experts are to be divided over; 1: experts of a group may lie anywhere.
        redundant: number of physical experts more than logical ones.
        loads: of each layer, or the path of their file (`counts.py`), or loads of each expert, the same in all
            layers; None: equal loads.

    Raises:
        ValueError: the file is missing or damaged.
    """

    def __init__(
        self,
        ranks: int,
        nodes: int = 1,
        redundant: int = 0,
        loads: str | Path | ExpertCounts | Sequence[float] | None = None,
    ):
        self._ranks, self._nodes, self._redundant = ranks, nodes, redundant
        self._loads = ExpertCounts.read(loads) if isinstance(loads, (str, Path)) else loads
        self._planned: dict[tuple[tuple[float, ...], int], Held] = {}  # by loads and groups

    @classmethod
    def of(cls, config: ParallelConfig, nodes: Sequence[int]) -> LayerPlacements:
        """The placements that the options describe, on ranks of these nodes."""
        ranks, count = len(nodes), 1 + max(nodes)
        wants = {config.moe_dispatch, config.decode_dispatch} & {"by_node", "auto", "deep_ep"}
        if not wants or list(nodes) != [rank * count // ranks for rank in range(ranks)]:
            count = 1
        return cls(ranks, count, config.redundant_experts, config.expert_loads)

    def loads(self, experts: int, layer: int) -> tuple[float, ...] | None:
        """The loads of a layer; None: equal ones.

        Raises:
            ValueError: there are not as many as experts.
        """
        given = self._loads
        if given is None:
            return None
        count = given.experts if isinstance(given, ExpertCounts) else len(given)
        if count != experts:
            raise ValueError(
                f"expert_loads have loads of {count} experts, the model has {experts} routed experts; count them with "
                "this model"
            )
        return given.of_layer(layer) if isinstance(given, ExpertCounts) else tuple(given)

    def held(self, experts: int, layer: int, groups: int, shared: float = 0.0) -> Held:
        """The experts of each rank.

        Args:
            groups: number of groups of consecutive experts in the model's router.
            shared: load of one more expert, over the load of all others together; 0: there is none.

        Raises:
            ValueError: the numbers of experts, replicas and ranks do not fit.
        """
        if not shared and self._loads is None and not self._redundant:
            return contiguous(experts, self._ranks)
        loads = with_shared(self.loads(experts, layer) or (1.0,) * experts, shared)
        experts = len(loads)
        replicas = experts + self._redundant
        if not self._ranks <= replicas <= experts * self._ranks:
            raise ValueError(
                f"redundant_experts {self._redundant}: {experts} routed experts on {self._ranks} ranks need at least "
                f"{max(0, self._ranks - experts)}, so that each rank holds one, and at most "
                f"{experts * (self._ranks - 1)}, so that none holds an expert twice"
            )
        if (loads, groups) not in self._planned:
            plan = balance_layer(loads, replicas, groups, self._nodes, self._ranks)
            self._planned[loads, groups] = tuple(map(tuple, plan))
        return self._planned[loads, groups]

    def better(self, now: Held, loads: Sequence[float], groups: int) -> Held:
        """The plan for other loads, on ranks where few experts need to move; ``now`` if that is hardly worse.

        Args:
            now: the placement so far.
            loads: of all logical experts, the shared one too if it is routed.
        """
        plan = balance_layer(loads, sum(map(len, now)), groups, self._nodes, self._ranks)
        if imbalance(loads, now) - imbalance(loads, plan) < _GAIN:
            return now
        return with_fewest_moves(now, plan, self._nodes)


class _Mesh(Protocol):
    """What the division of experts reads of a :class:`.mesh.Mesh`."""

    @property
    def config(self) -> ParallelConfig: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def nodes(self) -> Sequence[int]: ...

    @property
    def node_groups(self) -> NodeGroups | None: ...

    @property
    def ep(self) -> Group: ...

    @property
    def is_leader(self) -> bool: ...


class ExpertDivision:
    """The experts of all layers on a mesh; made before its nodes are known, and used after.

    Attributes:
        deep_ep: see :class:`.ExpertParallel`; set before any layer is made.
    """

    def __init__(self, mesh: _Mesh):
        self._mesh = mesh
        self.deep_ep: DeepEP | None = None
        self._made: dict[tuple[Held, int | None], ExpertParallel] = {}

    def of_layer(
        self, experts: int, layer: int, groups: int = 1, shared: float = 0.0, top_groups: int = 1
    ) -> ExpertParallel:
        """The division of a layer's ``experts`` logical experts over the ranks; layers with the same placement share
        one object, unless placements change.

        Args:
            groups: number of groups of consecutive experts in the model's router.
            shared: load of one more expert, over the load of all others together; 0: there is none.
            top_groups: number of groups from which a token takes experts.

        Raises:
            ValueError: the options do not fit the number of experts, or ``expert_loads`` cannot be read.
        """
        held = self._placements.held(experts, layer, groups, shared)
        changes = self._mesh.config.rebalance_every is not None
        key = held, layer if changes else None
        if key not in self._made:
            made = self._make(ExpertPlacement(held, self._mesh.device, changes))
            made.groups, made.top_groups = groups, top_groups
            made.deep_ep, made.side_stream = self.deep_ep, self._side_stream
            self._made[key] = made
        return self._made[key]

    def better(self, now: Held, loads: Sequence[float], groups: int) -> Held:
        """See :meth:`.LayerPlacements.better`."""
        return self._placements.better(now, loads, groups)

    @contextmanager
    def even_routing(self) -> Iterator[None]:
        """Within the block, token-expert pairs are spread evenly over the ranks instead of routed, so that the startup
        can measure the memory of a full round."""
        before = [(one, one.even) for one in self._made.values()]
        for one, _ in before:
            one.even = True
        try:
            yield
        finally:
            for one, even in before:
                one.even = even

    @cached_property
    def _placements(self) -> LayerPlacements:
        return LayerPlacements.of(self._mesh.config, self._mesh.nodes)

    def _make(self, placement: ExpertPlacement) -> ExpertParallel:
        return ExpertParallel(self._mesh.ep, placement, self._mesh.node_groups, self._choice)

    @cached_property
    def _side_stream(self) -> SideStream:
        groups = self._mesh.node_groups
        return SideStream(self._mesh.device, priority=-1) if groups is None else groups.there

    @cached_property
    def _choice(self) -> DispatchChoice:
        return DispatchChoice(self._mesh.nodes, logs=self._mesh.is_leader)


def with_shared(loads: Sequence[float], shared: float) -> tuple[float, ...]:
    """``loads``, and that of one more expert, which is ``shared`` times all others together; 0: there is none."""
    return (*loads, shared * math.fsum(loads)) if shared else tuple(loads)
