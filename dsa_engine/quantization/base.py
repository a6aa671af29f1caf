"""What a format of weights offers to the layers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dsa_engine.checkpoint import Source
from dsa_engine.config.quantization import WeightScheme


@dataclass(frozen=True)
class Matrix:
    """A weight ``[rows, columns]`` of the checkpoint, of which this rank keeps some (default: all)."""

    name: str
    rows: int
    columns: int
    kept_rows: tuple[int, int] | None = None  # first, last + 1
    kept_columns: tuple[int, int] | None = None

    @property
    def start(self) -> tuple[int, int]:
        """Row and column at which the kept part begins."""
        return (self.kept_rows or (0,))[0], (self.kept_columns or (0,))[0]

    @property
    def shape(self) -> tuple[int, int]:
        """Of the kept part."""
        first_row, last_row = self.kept_rows or (0, self.rows)
        first_column, last_column = self.kept_columns or (0, self.columns)
        return last_row - first_row, last_column - first_column

    def source(self, into: torch.Tensor) -> Source:
        """The kept part, to be read into ``into``."""
        return Source(self.name, into, (self.rows, self.columns), self.start)


class Weights(ABC):
    """Memory for some weights, reserved when it is made. Not an ``nn.Module``: calls of those take longer than a small
    product; the layer that it belongs to lists its tensors among its parameters."""

    tensors: tuple[torch.Tensor, ...]  # what takes memory
    sources: list[Source]  # what fills it

    def loaded(self) -> None:  # noqa: B027 - most have nothing to do
        """Called once, when ``sources`` have been loaded and before anything is multiplied or dequantised: the time to
        arrange what is stored as the products want it."""


class Linear(Weights):
    """``y = x · weightᵀ``."""

    # Whether a row is quantised by its largest magnitude, which a part of its columns does not show.
    scales_whole_rows: bool = False

    @abstractmethod
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``[..., in] -> [..., out]``, in x's dtype."""

    def forward_sharded(self, x: torch.Tensor, row_absmax: torch.Tensor) -> torch.Tensor:
        """The same for ``scales_whole_rows`` and an ``x`` that has only a part of the columns of its rows.

        Args:
            row_absmax: float32 ``[...]``, the largest magnitude of each whole row.
        """
        raise NotImplementedError

    @abstractmethod
    def dequantized(self) -> torch.Tensor:
        """The weight in plain numbers of the run's dtype, ``[out, in]``; no copy where it is stored so.

        Called once, after loading, for a layer that multiplies it in another way
        (:meth:`.layers.Weighted.take_plain_weight`).
        """


class GroupedExperts(Weights):
    """The routed experts of one rank, SwiGLU each: ``down · silu_mul(gate_up · x)``."""

    count: int

    @abstractmethod
    def __call__(
        self,
        tokens: torch.Tensor,
        experts: torch.Tensor,
        weights: torch.Tensor,
        *,
        served_fraction: float,
        served: int | None,
        uncounted_bytes: int,
    ) -> torch.Tensor:
        """Weighted sum of the chosen experts' outputs for every token: see :func:`.expert_mlp.expert_mlp`.

        Args:
            tokens: ``[T, hidden]``.
            experts: ``[T, k]`` int32, numbers below ``count``, −1 for choices that other ranks serve.
            weights: ``[T, k]`` float32.
            served_fraction: the part of the choices that is expected to be served here.
            served: how many are, where the host knows it.
            uncounted_bytes: most bytes of rows for which the host does not ask how many are served.

        Returns:
            ``[T, hidden]`` in the tokens' dtype.
        """


class WeightFormat(ABC):
    """Makes the linear layers and experts of a model; their memory is on the rank's device."""

    @abstractmethod
    def linear(self, *parts: Matrix) -> Linear:
        """A linear layer; several matrices of as many columns are stacked, one's rows behind the other's."""

    @abstractmethod
    def experts(self, prefixes: Sequence[str], hidden: int, intermediate: int) -> GroupedExperts:
        """One expert for each of ``prefixes``, which the names of its three matrices in the checkpoint begin with."""


class StoredFormat(WeightFormat):
    """Codes and scales, kept in as many bits as a checkpoint holds them.

    Args:
        scheme: how they are stored.
        dtype: of activations.
        device: where they are kept.

    Raises:
        ValueError: a scheme, or a device, that the class is not made for; the text names it and says what is possible.
    """

    @abstractmethod
    def __init__(self, scheme: WeightScheme, dtype: torch.dtype, device: torch.device): ...

    @staticmethod
    @abstractmethod
    def is_default_on(device: torch.device) -> bool:
        """Whether a checkpoint in this format is computed in it unless something else was asked for."""
