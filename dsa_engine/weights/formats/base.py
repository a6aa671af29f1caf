"""The interface between layers and the formats of their weights."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from dsa_engine.config.quantization import WeightScheme
from dsa_engine.kernels.grouped.products import ProductFormat, Weight
from dsa_engine.kernels.moe.expert_mlp import expert_mlp
from dsa_engine.parallel.experts.dispatch import Received
from dsa_engine.weights import Source


@dataclass(frozen=True)
class Matrix:
    """A weight ``[rows, columns]`` of the checkpoint, of which this rank keeps a part (default: all of it)."""

    name: str
    rows: int
    columns: int
    kept_rows: tuple[int, int] | None = None  # first, last + 1
    kept_columns: tuple[int, int] | None = None

    @property
    def start(self) -> tuple[int, int]:
        """First row and first column of the kept part."""
        return (self.kept_rows or (0,))[0], (self.kept_columns or (0,))[0]

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the kept part."""
        first_row, last_row = self.kept_rows or (0, self.rows)
        first_column, last_column = self.kept_columns or (0, self.columns)
        return last_row - first_row, last_column - first_column

    def source(self, into: torch.Tensor) -> Source:
        """The kept part, to be read into ``into``."""
        return Source(self.name, into, (self.rows, self.columns), self.start)


# Lists what fills the tensors of one matrix: a weight, or codes and scales.
SourcesOf = Callable[..., list[Source]]


class Weights(ABC):
    """Memory for some weights, reserved when it is made.

    It is no ``nn.Module``: calling one takes longer than a small product. The layer that it belongs to lists its
    tensors among its parameters.
    """

    tensors: tuple[torch.Tensor, ...]  # all memory that the weights take
    sources: list[Source]  # the parts of the checkpoint that fill it

    def loaded(self) -> None:  # noqa: B027 - most have nothing to do
        """Arranges the weights as the products want them: called once, when ``sources`` have been loaded and before
        anything is multiplied or dequantised."""


class Quantized(NamedTuple):
    """Memory for rows quantised 1 × 128, as :func:`.quantize.quantize_tokens` makes them: what makes the rows fills
    it."""

    words: torch.Tensor
    power_of_two: bool  # all scales

    def from_row(self, first: int) -> Quantized:
        return self._replace(words=self.words[first:])


class Multiplied(NamedTuple):
    """Rows with their products, see :meth:`Linear.multiplied`."""

    x: torch.Tensor
    quantized: Quantized | None
    outputs: Sequence[torch.Tensor]


def words_of(quantized: Quantized | None) -> Sequence[torch.Tensor]:
    return () if quantized is None else (quantized.words,)


class Linear(Weights):
    """``y = x · weightᵀ``."""

    rows: Sequence[int]  # of its matrices
    layers: Sequence[Linear] = ()  # of each matrix, where they cannot be stacked
    # Whether a row of x is quantised by its largest magnitude, which a rank with some of its columns cannot see.
    scales_whole_rows: bool = False

    @abstractmethod
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``[..., in] -> [..., out]``, in x's dtype."""

    def memory_for(self, rows: torch.Tensor) -> Quantized | None:
        """For what makes as many rows of the layer's input, which it and others take by :meth:`of_quantized`; None:
        nothing is gained."""
        return None

    def of_quantized(self, x: torch.Tensor, quantized: Quantized | None) -> torch.Tensor:
        """The layer of ``x``, to the same bits; ``quantized``: of ``x``, by a layer of any format."""
        return self(x)

    def multiplied(self, x: torch.Tensor, quantized: Quantized | None) -> Multiplied:
        """``x``, with the outputs of all matrices as columns of one product if they are stacked."""
        outputs = () if self.layers else self.of_quantized(x, quantized).split(self.rows, dim=-1)
        return Multiplied(x, quantized, outputs)

    def part(self, number: int, given: Multiplied) -> torch.Tensor:
        """The output of one matrix, which is multiplied now if none is stacked."""
        return given.outputs[number] if given.outputs else self.layers[number].of_quantized(given.x, given.quantized)

    def forward_sharded(self, x: torch.Tensor, row_absmax: torch.Tensor) -> torch.Tensor:
        """Does the same for an ``x`` with only some columns of its rows; called if ``scales_whole_rows``.

        Args:
            row_absmax: float32 ``[...]``, the largest magnitude of each whole row.
        """
        raise NotImplementedError

    @abstractmethod
    def dequantized(self) -> torch.Tensor:
        """The weight in plain numbers of the run's dtype, ``[out, in]``; no copy if it is stored so.

        Called once, after loading, for a layer that multiplies it in another way
        (:meth:`.layers.Weighted.take_plain_weight`).
        """

    def _stack(self, parts: Sequence[Matrix], tensors: tuple[torch.Tensor, ...], sources_of: SourcesOf) -> None:
        """Lists ``tensors``, whose rows are those of ``parts`` one after the other, and their sources."""
        self.rows = [part.shape[0] for part in parts]
        self.tensors, self.sources = tensors, []
        for part, *pieces in zip(parts, *(tensor.split(self.rows) for tensor in tensors), strict=True):
            self.sources += sources_of(part, *pieces)


class SideBySide(Linear):
    """Linear layers over the same input, with their outputs side by side: for matrices that cannot be stacked."""

    def __init__(self, layers: Sequence[Linear]):
        self.layers = layers
        self.rows = [rows for layer in layers for rows in layer.rows]
        self.tensors = tuple(tensor for layer in layers for tensor in layer.tensors)
        self.sources = [source for layer in layers for source in layer.sources]

    def loaded(self) -> None:
        for layer in self.layers:
            layer.loaded()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.of_quantized(x, None)

    def memory_for(self, rows: torch.Tensor) -> Quantized | None:
        return self.layers[0].memory_for(rows)

    def of_quantized(self, x: torch.Tensor, quantized: Quantized | None) -> torch.Tensor:
        return torch.cat([layer.of_quantized(x, quantized) for layer in self.layers], dim=-1)

    def dequantized(self) -> torch.Tensor:
        return torch.cat([layer.dequantized() for layer in self.layers])


class GroupedExperts(Weights):
    """The routed experts of one rank, SwiGLU each: ``down · silu_mul(gate_up · x)``.

    Args:
        prefixes: the names of each expert's three matrices in the checkpoint begin with its prefix.
        gate_up: ``[count, 2 n, …]`` each, gate before up: weights, or codes and scales.
        down: ``[count, …]`` each.
        product: the format in which the kernel takes ``gate_up`` and ``down``.
        dtype: of what it returns.
    """

    def __init__(
        self,
        prefixes: Sequence[str],
        hidden: int,
        intermediate: int,
        gate_up: Sequence[torch.Tensor],
        down: Sequence[torch.Tensor],
        sources_of: SourcesOf,
        product: ProductFormat,
        dtype: torch.dtype,
    ):
        self.count, self.product, self.dtype = len(prefixes), product, dtype
        self.gate_up, self.down = tuple(gate_up), tuple(down)
        self.tensors = (*gate_up, *down)
        self.sources = []
        for number, prefix in enumerate(prefixes):
            gate, up = zip(*(tensor[number].chunk(2) for tensor in gate_up), strict=True)
            for name, pieces in (("gate", gate), ("up", up)):
                self.sources += sources_of(Matrix(f"{prefix}.{name}_proj.weight", intermediate, hidden), *pieces)
            matrix = Matrix(f"{prefix}.down_proj.weight", hidden, intermediate)
            self.sources += sources_of(matrix, *(tensor[number] for tensor in down))

    @property
    def moved(self) -> tuple[torch.Tensor, ...]:
        """What an expert takes to another slot, here or on another rank: ``[count, …]`` each, as products read them."""
        return self.tensors

    def separate(self) -> None:
        """Undoes what :meth:`loaded` can do only for some experts, so that all others fit into their slots too."""

    def __call__(self, received: Received, uncounted_bytes: int) -> torch.Tensor:
        """Weighted sum of the chosen experts' outputs for every token: see :func:`.expert_mlp.expert_mlp`.

        Tokens are as they are or words of ``product.to_words``; the result is ``[R, hidden]`` in the run's dtype.
        """
        tokens, topk_ids, topk_weights, fraction, local_pairs, first = received
        return expert_mlp(
            tokens,
            topk_ids,
            topk_weights,
            *self.operands,
            self.product,
            dtype=self.dtype,
            first=first,
            local_fraction=fraction,
            local_pairs=local_pairs,
            uncounted_bytes=uncounted_bytes,
        )

    @property
    def operands(self) -> tuple[Weight, Weight]:
        """``gate_up`` and ``down`` as the kernel takes them."""
        return self.gate_up, self.down


class WeightFormat(ABC):
    """Makes the linear layers and experts of a model; their memory is on the rank's device."""

    @abstractmethod
    def linear(self, *parts: Matrix) -> Linear:
        """A linear layer; several matrices with the same number of columns are stacked by rows, in this order."""

    @abstractmethod
    def experts(self, prefixes: Sequence[str], hidden: int, intermediate: int) -> GroupedExperts:
        """One expert for each of ``prefixes``; see :class:`GroupedExperts`."""


class StoredFormat(WeightFormat):
    """Codes and scales, kept in as many bits as a checkpoint holds them.

    Args:
        scheme: how the checkpoint stores them.
    """

    @abstractmethod
    def __init__(self, scheme: WeightScheme, dtype: torch.dtype, device: torch.device): ...

    @staticmethod
    def is_default_on(device: torch.device) -> bool:
        """Whether weights of a checkpoint in this format stay in it by default, instead of being expanded."""
        return True
