"""SmoothQuant (arXiv 2211.10438): wide channels are divided before a product and multiplied within it.

    s[j] = max |x[j]|^α / max |w[:, j]|^(1 − α),   x[j] / s[j] · (w[:, j] · s[j])        equation 4, α = ½

The division is folded into the producer of the channel, a norm's weight or a row of the previous projection, so that
the model does no extra work. Here s is rounded to a power of two: the migration itself then rounds no weight.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from dsa_engine.config.model import ModelConfig
from dsa_engine.errors import CheckpointError
from dsa_engine.weights.reader import CHUNK_ELEMENTS, CheckpointReader
from dsa_engine.weights.tensors import Source

MAX_EXPONENT = 8  # factors from 1/256 to 256


@dataclass(frozen=True)
class Migration:
    """Channels that one tensor produces and others consume."""

    producer: str  # a norm's weight [channels], or a matrix with a row per channel
    consumers: tuple[str, ...]  # matrices with a column per channel; the statistics hold the inputs of the first
    rows: torch.Tensor | None = None  # the producer's rows; None: all


class Smoothing:
    """Factors of rows and columns, by name of the tensor."""

    def __init__(self) -> None:
        self._rows: dict[str, torch.Tensor] = {}
        self._columns: dict[str, torch.Tensor] = {}

    @classmethod
    def of(
        cls,
        config: ModelConfig,
        quantized: frozenset[str],
        statistics: Mapping[str, torch.Tensor],
        reader: CheckpointReader,
    ) -> Smoothing:
        """The factors of a model from the ranges of its channels; none without statistics. Reads the weights once.

        ``quantized``: names of the weights whose inputs are to be quantised. ``statistics``: the largest magnitude of
        each input channel, by the weight's name; layers without one (an expert without tokens, the MTP module) stay.
        """
        made = cls()
        for migration in _migrations(config, reader) if statistics else ():
            largest = statistics.get(migration.consumers[0])
            consumers = [name for name in migration.consumers if name in quantized]
            if largest is None or not consumers:
                continue
            weights = torch.stack([_largest_of_columns(reader, name) for name in consumers]).amax(dim=0)
            if largest.shape != weights.shape:
                raise CheckpointError(
                    f"the statistics have {list(largest.shape)} channels for {migration.consumers[0]!r}, which has "
                    f"{list(weights.shape)}: they are another model's"
                )
            factor = power_of_two_factors(largest, weights)
            for name in migration.consumers:
                made._columns[name] = factor
            rows = factor
            if migration.rows is not None:
                rows = torch.ones(reader.describe(migration.producer)[0][0])
                rows[migration.rows] = factor
            made._rows[migration.producer] = made._rows.get(migration.producer, 1.0) / rows
        return made

    def apply(self, name: str, values: torch.Tensor, first_row: int) -> None:
        """Multiplies ``values``, the float32 rows of tensor ``name`` from ``first_row`` on, in place."""
        rows, columns = self._rows.get(name), self._columns.get(name)
        if rows is not None:
            mine = rows[first_row : first_row + values.shape[0]]
            values.mul_(mine if values.dim() == 1 else mine[:, None])
        if columns is not None:
            values.mul_(columns)


def power_of_two_factors(activations: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The factor of each channel from its largest magnitudes on both sides; 1 if either is 0."""
    factor = (activations.float() / weights.float()).sqrt()
    nonzero = (activations > 0) & (weights > 0)
    exponent = torch.where(nonzero, factor, 1.0).log2().round().clamp(-MAX_EXPONENT, MAX_EXPONENT)
    return torch.exp2(exponent)


def _migrations(config: ModelConfig, reader: CheckpointReader) -> Iterator[Migration]:
    names_present = reader.names()

    def consumers(prefix: str, *names: str) -> tuple[str, ...]:
        return tuple(full for name in names if (full := f"{prefix}{name}.weight") in names_present)

    heads = torch.arange(config.num_attention_heads)[:, None] * (config.qk_nope_head_dim + config.v_head_dim)
    values = (heads + config.qk_nope_head_dim + torch.arange(config.v_head_dim)).flatten()
    for layer in range(config.num_hidden_layers):
        attention, mlp = f"model.layers.{layer}.self_attn.", f"model.layers.{layer}.mlp."
        of_q, of_values = consumers(attention, "q_b_proj", "indexer.wq_b"), consumers(attention, "o_proj")
        # All other matrices read the layer's input: one that were missed would be scaled on one side only.
        others = names_present - {*of_q, *of_values, f"{attention}kv_b_proj.weight"}
        matrices = (name for name in others if name.startswith(attention) and len(reader.describe(name)[0]) == 2)
        of_input = sorted((name for name in matrices if name.endswith(".weight")), reverse=True)  # q_a_proj first
        yield Migration(f"model.layers.{layer}.input_layernorm.weight", tuple(of_input))
        yield Migration(f"{attention}q_a_layernorm.weight", of_q)
        yield Migration(f"{attention}kv_b_proj.weight", of_values, values)
        feed_forward = [mlp]
        if config.mlp_layer_types[layer] == "sparse":
            experts = [f"{mlp}experts.{expert}." for expert in range(config.n_routed_experts)]
            feed_forward = [f"{mlp}shared_experts.", *experts]
        made = [name for prefix in feed_forward for name in consumers(prefix, "gate_proj", "up_proj")]
        yield Migration(f"model.layers.{layer}.post_attention_layernorm.weight", (*made, *consumers(mlp, "gate")))
        for prefix in feed_forward:
            yield Migration(f"{prefix}up_proj.weight", consumers(prefix, "down_proj"))


def _largest_of_columns(reader: CheckpointReader, name: str) -> torch.Tensor:
    (rows, columns), _ = reader.describe(name)
    largest = torch.zeros(columns)
    step = max(1, CHUNK_ELEMENTS // columns)
    for first in range(0, rows, step):
        part = torch.empty(min(step, rows - first), columns)
        reader.load(Source(name, part, (rows, columns), (first, 0)))
        largest = torch.maximum(largest, part.abs_().amax(dim=0))
    return largest
