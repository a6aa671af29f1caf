"""Where and how a model runs: its ranks, dtype, stored weights, workspace, and what may run beside the main stream."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from dsa_engine.parallel import Mesh
from dsa_engine.parallel.side_stream import SideStream
from dsa_engine.quantization import WeightFormat


@dataclass(frozen=True)
class Runtime:
    """Where the model runs, in which dtype, what its weights are stored as, and what it may use beside them and its
    caches."""

    mesh: Mesh
    dtype: torch.dtype  # of activations, and of the weights that are never quantised
    weights: WeightFormat
    workspace: int  # bytes for scores, gathered rows and the like
    max_tokens: int = 8192  # most tokens of this rank in a forward pass
    overlap_shared_expert: bool = True  # on CUDA: see Streams
    overlap_indexer: bool = True

    @property
    def device(self) -> torch.device:
        return self.mesh.device


class Streams(NamedTuple):
    """What may run beside the main stream; on a CPU all of it runs in order."""

    shared_expert: SideStream  # under gate and dispatch
    indexer: SideStream  # its prolog, beside MLA's

    @classmethod
    def of(cls, runtime: Runtime) -> Streams:
        return cls(
            SideStream(runtime.device, enabled=runtime.overlap_shared_expert),
            SideStream(runtime.device, enabled=runtime.overlap_indexer),
        )
