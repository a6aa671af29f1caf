"""The mesh of one rank of many, in one process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from dsa_engine.measure.emulation.expert_parallel import EmulatedExpertParallel
from dsa_engine.measure.emulation.group import EmulatedGroup
from dsa_engine.parallel import Mesh
from dsa_engine.parallel.experts.expert_parallel import ExpertParallel
from dsa_engine.parallel.experts.layer_placements import ExpertDivision
from dsa_engine.parallel.experts.placement import ExpertPlacement
from dsa_engine.parallel.group import Group

if TYPE_CHECKING:
    from dsa_engine.measure.emulation.config import EmulatedConfig


class EmulatedDivision(ExpertDivision):
    """Experts that tokens choose evenly."""

    def _make(self, placement: ExpertPlacement) -> ExpertParallel:
        return EmulatedExpertParallel(self._mesh.ep, placement, choice=self._choice)


class EmulatedMesh(Mesh):
    """Groups of the right sizes, of which only this rank exists."""

    config: EmulatedConfig

    def __init__(self, config: EmulatedConfig, device: torch.device):
        super().__init__(config, config.emulate_rank, config.emulate_world, device)
        self.set_nodes([rank // config.node_size for rank in range(self.world_size)])

    def barrier(self, wait_s: float) -> None:
        """An emulated rank is the only process."""

    @property
    def processes(self) -> Group:
        return self.host

    def _host_group(self) -> Group:
        return Group((self.rank,), 0, None)

    def _part(self, parts: Sequence[Sequence[int]], communicator: int = 0) -> EmulatedGroup:
        (mine,) = [tuple(part) for part in parts if self.rank in part]
        return EmulatedGroup(mine, mine.index(self.rank), None)

    def _divide_experts(self) -> ExpertDivision:
        return EmulatedDivision(self) if self.world_size > 1 else super()._divide_experts()
