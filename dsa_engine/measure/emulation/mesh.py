"""The mesh of one rank of many, in one process."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias, cast

import torch

from dsa_engine.engine.engine import Engine
from dsa_engine.engine.steps.plan import StepPlan
from dsa_engine.measure.emulation.assigned_experts import AssignedExperts
from dsa_engine.measure.emulation.expert_parallel import EmulatedExpertParallel
from dsa_engine.measure.emulation.group import EmulatedGroup
from dsa_engine.parallel import Mesh
from dsa_engine.parallel.experts.expert_parallel import ExpertParallel
from dsa_engine.parallel.experts.layer_placements import ExpertDivision, LayerPlacements
from dsa_engine.parallel.experts.placement import ExpertPlacement
from dsa_engine.parallel.group import Group

if TYPE_CHECKING:
    from dsa_engine.measure.emulation.config import EmulatedConfig


Part: TypeAlias = Literal["prefill", "decode"]


class AssignedDivision(ExpertDivision):
    """Experts whose tokens are assigned to them; those of a rank stay in their order if no option places them."""

    _mesh: EmulatedMesh

    @cached_property
    def _placements(self) -> LayerPlacements:
        config = self._mesh.config
        if isinstance(config.expert_loads, (str, Path)) or config.redundant_experts:
            return super()._placements
        return LayerPlacements(self._mesh.ep.size)

    def _make(self, placement: ExpertPlacement, loads: Sequence[float] | None) -> ExpertParallel:
        mesh, given = self._mesh, self._mesh.config.expert_loads
        if given is not None and not isinstance(given, (str, Path)):
            loads = given
        mesh.assigned.append(AssignedExperts(placement, mesh.rank, loads, mesh.config.route_shared_expert))
        return EmulatedExpertParallel(mesh.ep, placement, mesh.assigned[-1], mesh.machine_groups, self._choice)


class EmulatedMesh(Mesh):
    """Groups of the right sizes, of which only this rank exists.

    Attributes:
        part: the part of a run in two parts that the mesh is; None: the run has one part.
        assigned: the experts that the tokens of all ranks choose; empty in a world of one rank.
        stand_in_seconds: the time to stand in for the other ranks, for every kind of pass that was watched.
        static_step: whether an engine with CUDA graphs would replay the current step.
    """

    config: EmulatedConfig
    cp: EmulatedGroup
    communicates = False

    def __init__(self, config: EmulatedConfig, device: torch.device, part: Part | None = None):
        super().__init__(config, config.emulate_rank, config.emulate_world, device)
        self.part = part
        self.assigned: list[AssignedExperts] = []
        self.stand_in_seconds: dict[Hashable, float] = {}
        self.static_step = False
        self.set_machines([rank // config.machine_size for rank in range(self.world_size)])

    def barrier(self, wait_s: float) -> None:
        """An emulated rank is the only process."""

    @property
    def processes(self) -> Group:
        return self.host

    def _host_group(self) -> Group:
        return Group((self.rank,), 0, None)

    def _part(self, parts: Sequence[Sequence[int]], communicator: int = 0) -> EmulatedGroup:
        (mine,) = [tuple(part) for part in parts if self.rank in part]
        return EmulatedGroup(mine, mine.index(self.rank), None, communicator=communicator)

    def _divide_experts(self) -> ExpertDivision:
        return AssignedDivision(self) if self.world_size > 1 else super()._divide_experts()

    @torch.inference_mode()  # as the steps, whose graphs hold tensors that are written here
    def begin_step(self, step: StepPlan) -> None:
        """Sets the number of tokens that each rank has in the next step."""
        self.static_step = step.decodes and self.static_decode
        for assigned in self.assigned:
            assigned.begin_step([rank.num_tokens for rank in step.ranks], _padded_rows(step))


def _padded_rows(step: StepPlan) -> dict[int, list[tuple[int, ...]]]:
    """The rows of every rank that are tokens, in each pass of a padded step, by the pass's number of rows.

    The step's own pass may have a different number of rows for each request. A draft pass has one row of every request.
    With several MTP modules, a pass also has some rows before those of the step (``engine/speculation/passes.py``).
    """
    bucket = step.bucket
    if bucket is None:
        return {}
    ones = {bucket.requests: [tuple(range(len(rank.chunks))) for rank in step.ranks]}
    own = [tuple(row for row, at in enumerate(rank.positions.tolist()) if at >= 0) for rank in step.ranks]
    count = bucket.rows_per_request - 1
    wide = [
        tuple(
            i * 2 * count + j
            for i, chunk in enumerate(rank.chunks)
            for j in range(min(count - 1, chunk.start) + chunk.length)
        )
        for rank in step.ranks
    ]
    of_modules = {bucket.requests * 2 * count: wide} if count > 1 else {}
    return {**of_modules, **ones, bucket.rows: own}


def emulated(mesh: Mesh) -> EmulatedMesh | None:
    """The mesh, if its other ranks are made up."""
    return None if mesh.communicates else cast(EmulatedMesh, mesh)


def deals_evenly(mesh: Mesh) -> bool:
    """Whether tokens get their experts in turn, not from a router."""
    made_up = emulated(mesh)
    return made_up is not None and mesh.world_size > 1 and not made_up.config.expert_loads


def follow_steps(engine: Engine) -> None:
    """Lets the mesh of an emulated rank observe an engine; does nothing on a mesh that communicates.

    The mesh learns the tokens of all ranks in every step, the groups of experts of the model's router, and the position
    of the scales in FP8 cache rows.

    Without it, all ranks have as many tokens as this one.
    """
    mesh = emulated(engine.mesh)
    if mesh is None or mesh.begin_step in engine.runner.observers:
        return
    for assigned in mesh.assigned:
        assigned.limit(engine.config.n_group, engine.config.topk_group)
    stored = engine.cache.format
    if stored.fp8 and stored.index_key is not None:
        mesh.cp.scale_at = stored.latent.columns + stored.index_key.dim
    engine.runner.observers.append(mesh.begin_step)
