"""The surroundings of a model: mesh, dtype, weight format, workspace, side streams."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from dsa_engine.kernels.runtime.transfer import SideStream
from dsa_engine.parallel import Mesh
from dsa_engine.weights.formats import WeightFormat


@dataclass(frozen=True)
class Runtime:
    """Everything that layers share."""

    mesh: Mesh
    dtype: torch.dtype  # dtype of activations and of the weights that are never quantised
    weights: WeightFormat
    workspace: int  # bytes for scores, gathered rows and the like
    max_tokens: int = 8192  # bound on this rank's tokens in a forward pass

    @property
    def device(self) -> torch.device:
        return self.mesh.device


class Streams(NamedTuple):
    """Side streams for work beside the main stream; on a CPU all work runs in order."""

    shared_expert: SideStream  # the shared expert, while tokens travel to their experts
    cache_rows: SideStream  # beside all queries
    index_queries: SideStream  # beside MLA's queries

    @classmethod
    def of(cls, runtime: Runtime) -> Streams:
        return cls(*(SideStream(runtime.device) for _ in cls._fields))
