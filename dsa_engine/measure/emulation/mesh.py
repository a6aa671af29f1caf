"""The mesh of one rank of many, in one process."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING

import torch

from dsa_engine.engine.engine import Engine
from dsa_engine.engine.steps.plan import StepPlan
from dsa_engine.measure.emulation.assigned_experts import AssignedExperts
from dsa_engine.measure.emulation.expert_parallel import EmulatedExpertParallel
from dsa_engine.measure.emulation.group import EmulatedGroup
from dsa_engine.parallel import Mesh
from dsa_engine.parallel.expert_parallel import ExpertParallel
from dsa_engine.parallel.group import Group
from dsa_engine.parallel.placement import ExpertPlacement

if TYPE_CHECKING:
    from dsa_engine.measure.emulation.config import EmulatedConfig


class EmulatedMesh(Mesh):
    """Groups of the right sizes of which only this rank exists.

    Attributes:
        assigned: expert choices of the tokens of all ranks; empty if this rank is the only one.
        stand_in_seconds: seconds of work in place of the other ranks, for every kind of watched pass.
        static_step: whether an engine with CUDA graphs would replay the current step.
    """

    config: EmulatedConfig

    def __init__(self, config: EmulatedConfig, device: torch.device):
        super().__init__(config, config.emulate_rank, config.emulate_world, device)
        self.assigned: list[AssignedExperts] = []
        self.stand_in_seconds: dict[Hashable, float] = {}
        self.static_step = False
        self.set_machines([rank // config.machine_size for rank in range(self.world_size)])

    def meet(self, wait_s: float) -> None:
        """Does nothing: an emulated rank has no other rank to wait for."""

    @property
    def reports(self) -> bool:
        """An emulated rank is alone."""
        return True

    def _host_group(self) -> Group:
        """An emulated rank has no other to talk to."""
        return Group((self.rank,), 0, None)

    def _group(self, size: int) -> EmulatedGroup:
        first = self.rank - self.rank % size
        return EmulatedGroup(tuple(range(first, first + size)), self.rank - first, None)

    def _make_expert_parallel(self, placement: ExpertPlacement) -> ExpertParallel:
        if self.world_size == 1:
            return super()._make_expert_parallel(placement)
        self.assigned.append(AssignedExperts(placement, self.rank, self.config.expert_loads))
        return EmulatedExpertParallel(self.ep, placement, self.assigned[-1])

    @torch.inference_mode()  # as the steps, whose graphs hold tensors that are written here
    def begin_step(self, step: StepPlan) -> None:
        """Sets the number of tokens of each rank in the next step."""
        self.static_step = step.decodes and self.static_decode
        for assigned in self.assigned:
            assigned.begin_step([rank.num_tokens for rank in step.ranks], _padded_rows(step))


def _padded_rows(step: StepPlan) -> dict[int, list[tuple[int, ...]]]:
    """Rows of every rank that are tokens, for each pass of a padded step: the step's own pass, in which requests may
    have unequal numbers of rows; draft passes, with one row per request; and those of several MTP modules, which also
    have some rows before the step's own (``engine/speculation/passes.py``)."""
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


def follow_steps(engine: Engine) -> None:
    """Tells an emulated rank the number of tokens of the other ranks in every step, the expert groups of the model's
    router, and the position of the scales in FP8 cache rows. Does nothing for a real mesh.

    Without this call all ranks are assumed to have as many tokens as this one.
    """
    mesh = engine.mesh
    if not isinstance(mesh, EmulatedMesh) or mesh.begin_step in engine.runner.observers:
        return
    for assigned in mesh.assigned:
        assigned.limit(engine.config.n_group, engine.config.topk_group)
    stored = engine.cache.format
    if stored.fp8 and stored.index_key is not None and isinstance(mesh.cp, EmulatedGroup):
        mesh.cp.scale_at = stored.latent.columns + stored.index_key.dim
    engine.runner.observers.append(mesh.begin_step)
