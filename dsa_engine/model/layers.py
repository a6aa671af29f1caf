"""What the model's parts share: weights that know where they come from, the feed-forward layer, the placement."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from dsa_engine.checkpoint import Source
from dsa_engine.kernels.silu_mul import silu_mul
from dsa_engine.parallel import Mesh
from dsa_engine.parallel.streams import SideStream


@dataclass(frozen=True)
class Runtime:
    """Where the model runs, in which dtype, and what it may use beside its weights and caches."""

    mesh: Mesh
    dtype: torch.dtype
    workspace: int  # bytes for scores, gathered rows and the like
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


class Weighted(nn.Module):
    """A module that says, where each weight is born, what it is called in the checkpoint and which part a rank
    keeps."""

    def __init__(self, runtime: Runtime):
        super().__init__()
        self.runtime = runtime
        self.sources: list[Source] = []

    def weight(
        self,
        name: str,
        *shape: int,
        rows: tuple[int, int] | None = None,
        columns: tuple[int, int] | None = None,
        dtype: torch.dtype | None = None,
    ) -> nn.Parameter:
        """A weight of ``shape`` in the checkpoint, of which this rank keeps ``rows`` and ``columns`` (default: all)."""
        kept = [(0, size) for size in shape]
        if rows is not None:
            kept[0] = rows
        if columns is not None:
            kept[1] = columns
        parameter = self.stack(*(last - first for first, last in kept), dtype=dtype)
        self.fill(parameter, name, shape, tuple(first for first, _ in kept))
        return parameter

    def stack(self, *shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
        """An empty weight whose parts come from several tensors; name each part with :meth:`fill`."""
        return nn.Parameter(
            torch.empty(shape, dtype=dtype or self.runtime.dtype, device=self.runtime.device), requires_grad=False
        )

    def fill(self, into: torch.Tensor, name: str, shape: tuple[int, ...], start: tuple[int, ...] = ()) -> None:
        self.sources.append(Source(name, into.data, tuple(shape), start))


class MLP(Weighted):
    """SwiGLU feed-forward layer, on local tokens, not sharded: ``[T, hidden] -> [T, hidden]``."""

    def __init__(self, prefix: str, hidden: int, intermediate: int, runtime: Runtime):
        super().__init__(runtime)
        self.gate_up = self.stack(2 * intermediate, hidden)
        self.fill(self.gate_up[:intermediate], f"{prefix}.gate_proj.weight", (intermediate, hidden))
        self.fill(self.gate_up[intermediate:], f"{prefix}.up_proj.weight", (intermediate, hidden))
        self.down = self.weight(f"{prefix}.down_proj.weight", hidden, intermediate)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(silu_mul(F.linear(x, self.gate_up)), self.down)
