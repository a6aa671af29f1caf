"""A tensor of a checkpoint before it has values."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class TensorSpec:
    """Name, shape and dtype; ``quantized`` weights are FP8 and followed by their ``…_scale_inv``."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    quantized: bool = False

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize
