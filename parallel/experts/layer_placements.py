"""The experts of all layers: the placement of each, consecutive or a plan by loads and with replicas, and what a mesh
makes of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from importlib import import_module
from pathlib import Path

from dsa_engine.kernels.formats.quantize import quantized_words
from dsa_engine.kernels.runtime.transfer import SideStream
from dsa_engine.parallel.config import ParallelConfig
from dsa_engine.parallel.experts import KINDS
from dsa_engine.parallel.experts.balance import balance_layer, imbalance
from dsa_engine.parallel.experts.counts import ExpertCounts
from dsa_engine.parallel.experts.dispatch import Alone, Dispatcher, ModelSizes, Ranks
from dsa_engine.parallel.experts.movement import with_fewest_moves
from dsa_engine.parallel.experts.placement import ExpertParallel, ExpertPlacement, Held, contiguous

_GAIN = 0.02  # experts move if the largest load of a rank falls by at least this part of the mean


class LayerPlacements:
    """Makes placements; the same on every rank.

    Args:
        nodes: number of nodes that groups of experts are to be divided over; 1: experts of a group may lie anywhere.
        redundant: number of physical experts more than logical ones.
        loads: of each layer, or the path of their file (`counts.py`), or loads of each expert, the same in all
            layers; None: equal loads.
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
        ranks, count = len(nodes), 1 + max(nodes)
        wanted = any(KINDS[name].on_nodes for name in (config.moe_dispatch, config.decode_dispatch))
        if not wanted or list(nodes) != [rank * count // ranks for rank in range(ranks)]:
            count = 1
        return cls(ranks, count, config.redundant_experts, config.expert_loads)

    def loads(self, experts: int, layer: int) -> tuple[float, ...] | None:
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

    def held(self, experts: int, layer: int, groups: int) -> Held:
        """The experts of each rank; see :meth:`ExpertDivision.of_layer`."""
        if self._loads is None and not self._redundant:
            return contiguous(experts, self._ranks)
        loads = self.loads(experts, layer) or (1.0,) * experts
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
        """The plan for other loads, of all logical experts, on ranks where few experts need to move; ``now``, the
        placement so far, if that is hardly worse."""
        plan = balance_layer(loads, sum(map(len, now)), groups, self._nodes, self._ranks)
        if imbalance(loads, now) - imbalance(loads, plan) < _GAIN:
            return now
        return with_fewest_moves(now, plan, self._nodes)


class ExpertDivision:
    """The experts of all layers on a mesh, and the ways of tokens to them; made before its nodes are known, and used
    after."""

    def __init__(self, mesh: Ranks):
        self._mesh = mesh
        self._made: dict[tuple[Held, int | None], ExpertParallel] = {}
        self.quantized_sum_bytes: int | None = None  # see ExpertParallel

    def prepare(self, sizes: ModelSizes) -> None:
        """See :meth:`.Dispatcher.prepare`; called before any layer is made."""
        if self._mesh.config.moe_combine_dtype == "fp8":
            if (words := quantized_words(sizes.hidden)) is None:
                raise ValueError(
                    "moe_combine_dtype 'fp8' needs a hidden_size that is a multiple of 4; this model has "
                    f"{sizes.hidden}"
                )
            self.quantized_sum_bytes = 4 * words
        for one in dict.fromkeys(self.dispatchers):
            one.prepare(sizes)

    def of_layer(self, experts: int, layer: int, groups: int = 1, top_groups: int = 1) -> ExpertParallel:
        """The division of a layer's ``experts`` logical experts over the ranks; layers with the same placement share
        one object, unless placements change. ``groups`` and ``top_groups`` are those of the model's router."""
        held = self.placements.held(experts, layer, groups)
        changes = self._mesh.config.rebalance_every is not None
        key = held, layer if changes else None
        if key not in self._made:
            made = self._make(ExpertPlacement(held, self._mesh.device, changes))
            made.groups, made.top_groups, made.side_stream = groups, top_groups, self._side_stream
            made.quantized_sum_bytes = self.quantized_sum_bytes
            self._made[key] = made
        return self._made[key]

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
    def placements(self) -> LayerPlacements:
        return LayerPlacements.of(self._mesh.config, self._mesh.nodes)

    def _make(self, placement: ExpertPlacement) -> ExpertParallel:
        return ExpertParallel(self._mesh.ep, placement)

    @cached_property
    def dispatchers(self) -> tuple[Dispatcher, Dispatcher]:
        """Of prefill and of decode steps."""
        prefill, decode = self._mesh.config.moe_dispatch, self._mesh.config.decode_dispatch
        made = {name: self._make_dispatcher(name) for name in (prefill, decode)}
        return made[prefill], made[decode].for_decode()

    def _make_dispatcher(self, name: str) -> Dispatcher:
        """No token of one rank travels; that a library needs several ranks, it says itself."""
        if self._mesh.ep.size == 1 and KINDS[name].library is None:
            return Alone()
        dispatcher: Dispatcher = import_module(f"dsa_engine.parallel.experts.{name}").make(self._mesh)
        return dispatcher

    @cached_property
    def _side_stream(self) -> SideStream:
        groups = self._mesh.node_groups
        return SideStream(self._mesh.device, priority=-1) if groups is None else groups.there
