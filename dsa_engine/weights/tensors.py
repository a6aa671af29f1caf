"""A tensor that a checkpoint is to hold, and the part of a stored tensor that fills a parameter."""

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


@dataclass(frozen=True)
class Source:
    """The tensor, or part of one, that fills a parameter."""

    name: str  # tensor name in the checkpoint
    into: torch.Tensor  # 1-D or 2-D, filled in place in its dtype, on its device; its shape is that of the part
    shape: tuple[int, ...]  # the full shape that the checkpoint must hold
    start: tuple[int, ...] = ()  # start of the part in every dimension; () is the origin
    scale_of: torch.dtype | None = None  # for a scale: the dtype of the codes that it multiplies
    without: str = ""  # name of a tensor that would give this one another meaning: the checkpoint must not hold it

    @property
    def holds_codes(self) -> bool:
        """Whether ``into`` takes the stored bytes: codes, which mean nothing without their scales."""
        return not self.into.is_floating_point() or self.into.dtype == torch.float8_e4m3fn

    def __post_init__(self) -> None:
        start = self.start or (0,) * len(self.shape)
        object.__setattr__(self, "start", start)
        if len(self.shape) not in (1, 2) or not len(self.shape) == len(start) == self.into.dim():
            raise ValueError(
                f"{self.name}: shape {list(self.shape)}, start {list(start)} and the destination "
                f"{list(self.into.shape)} must all have one dimension, or all two"
            )
        if any(s < 0 or s + n > full for s, n, full in zip(start, self.into.shape, self.shape, strict=True)):
            part = f"a part {list(self.into.shape)} at {list(start)}"
            raise ValueError(f"{self.name}: {part} does not lie inside {list(self.shape)}")
