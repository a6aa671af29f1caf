"""Parts of layers: modules that know the sources of their weights, and the feed-forward layer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from dsa_engine.kernels.linear.linear import linear
from dsa_engine.kernels.rows.silu_mul import silu_mul
from dsa_engine.model.runtime import Runtime
from dsa_engine.weights import Source
from dsa_engine.weights.formats import GroupedExperts, Linear, Matrix, Weights
from dsa_engine.weights.formats.base import Quantized


class Weighted(nn.Module):
    """A module that declares, for each of its weights, the name in the checkpoint and the part that this rank keeps."""

    def __init__(self, runtime: Runtime):
        super().__init__()
        self.runtime = runtime
        self.sources: list[Source] = []
        self._weights: list[Weights] = []  # linear layers and experts
        self.stored = nn.ParameterList()  # their tensors

    def weight(
        self,
        name: str,
        *shape: int,
        rows: tuple[int, int] | None = None,
        padded_rows: int = 0,
        dtype: torch.dtype | None = None,
    ) -> nn.Parameter:
        """A weight of ``shape`` in the checkpoint, of which this rank keeps ``rows`` (default: all), and after them
        zeros up to ``padded_rows``."""
        bounds = [(0, size) for size in shape]
        if rows is not None:
            bounds[0] = rows
        count, *columns = [last - first for first, last in bounds]
        size = [max(count, padded_rows), *columns]
        values = torch.empty(size, dtype=dtype or self.runtime.dtype, device=self.runtime.device)
        values[count:].zero_()
        self.sources.append(Source(name, values[:count], shape, tuple(first for first, _ in bounds)))
        return nn.Parameter(values, requires_grad=False)

    def linear(self, name: str, out: int, into: int, columns: tuple[int, int] | None = None) -> Linear:
        """A linear layer of ``[out, into]`` in the checkpoint, of which this rank keeps ``columns`` (default: all)."""
        return self.stacked_linear(Matrix(name, out, into, kept_columns=columns))

    def stacked_linear(self, *parts: Matrix) -> Linear:
        """One linear layer of several matrices of the checkpoint, whose rows follow one another."""
        linear = self.runtime.weights.linear(*parts)
        self._own(linear)
        return linear

    def grouped_experts(self, prefixes: Sequence[str], hidden: int, intermediate: int) -> GroupedExperts:
        experts = self.runtime.weights.experts(prefixes, hidden, intermediate)
        self._own(experts)
        return experts

    def _own(self, weights: Weights) -> None:
        self._weights.append(weights)
        self.sources += weights.sources
        self.stored.extend(nn.Parameter(tensor, requires_grad=False) for tensor in weights.tensors)

    def take_plain_weight(self, linear: Linear) -> torch.Tensor:
        """The plain weight of a linear layer, which cannot be called afterwards: the stored codes and scales are freed.
        Called once, in :meth:`weights_loaded`, for a weight that is multiplied in another way than ``linear`` does."""
        weight = linear.dequantized()
        if not any(weight is tensor for tensor in linear.tensors):
            self._weights.remove(linear)
            others = [tensor for weights in self._weights for tensor in weights.tensors]
            self.stored = nn.ParameterList(nn.Parameter(tensor, requires_grad=False) for tensor in [*others, weight])
            names = {source.name for source in linear.sources}
            self.sources = [source for source in self.sources if source.name not in names]
        return weight

    def arrange_weights(self) -> None:
        """Arranges the weights as their products want them; called once after loading, before
        :meth:`weights_loaded`."""
        for weights in self._weights:
            weights.loaded()

    def weights_loaded(self) -> None:
        """Derives weights from the loaded ones; called once."""


class Float32OutputLinear(Weighted):
    """``x [T, in] -> [T, out]`` with a float32 result, for the few products whose rounding would choose other tokens
    or experts. The weight is never quantised.

    If the checkpoint holds the weight in bfloat16, its products with bfloat16 activations are exact in float32, in
    which tensor cores sum them: on CUDA such a weight stays in bfloat16 and nothing is cast.
    """

    def __init__(self, name: str, out: int, into: int, runtime: Runtime):
        super().__init__(runtime)
        self.matrix = self.weight(name, out, into, dtype=torch.float32)

    def weights_loaded(self) -> None:
        if self.runtime.device.type == "cuda" and self.runtime.dtype == torch.bfloat16:
            narrow = self.matrix.to(torch.bfloat16)
            if not bool((narrow.float() != self.matrix).any()):
                self.matrix = nn.Parameter(narrow, requires_grad=False)
                self.sources.clear()  # they hold the float32 weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x.to(self.matrix.dtype), self.matrix, torch.float32)


class MLP(Weighted):
    """SwiGLU feed-forward layer, on local tokens, not sharded: ``[T, hidden] -> [T, hidden]``."""

    def __init__(self, prefix: str, hidden: int, intermediate: int, runtime: Runtime):
        super().__init__(runtime)
        self.gate_up = self.stacked_linear(
            Matrix(f"{prefix}.gate_proj.weight", intermediate, hidden),
            Matrix(f"{prefix}.up_proj.weight", intermediate, hidden),
        )
        self.down = self.linear(f"{prefix}.down_proj.weight", hidden, intermediate)

    def forward(self, x: torch.Tensor, quantized: Quantized | None = None) -> torch.Tensor:
        """``quantized``: of x, if :meth:`.Linear.memory_for` of ``gate_up`` had some."""
        gate_up = self.gate_up.of_quantized(x, quantized)
        gated = self.down.memory_for(gate_up)
        return self.down.of_quantized(silu_mul(gate_up, *(gated or ())), gated)
