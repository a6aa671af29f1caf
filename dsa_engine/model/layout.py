"""The released layout: every tensor of a checkpoint, by name, shape and dtype, as the model's modules declare them.

A :class:`Model` is built on the meta device, without memory, and its sources are collected. They also give the sizes of
a model before anything is loaded: parameters and bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from dsa_engine.config.model import ModelConfig
from dsa_engine.config.released import RELEASED_BLOCK_SIZE
from dsa_engine.kernels.formats.quantize import FP8
from dsa_engine.kernels.runtime.integers import cdiv
from dsa_engine.model.layers import Float32OutputLinear, Weighted
from dsa_engine.model.model import Model
from dsa_engine.model.runtime import Runtime
from dsa_engine.parallel import Mesh, ParallelConfig
from dsa_engine.weights import Source, TensorSpec
from dsa_engine.weights.formats import GroupedExperts, Linear, Matrix, WeightFormat

_META = torch.device("meta")
_CODES = torch.empty(0, 0, dtype=FP8, device=_META)

# The order of a layer's tensors in a released checkpoint, by the beginnings of their names.
_ORDER = (
    "embed_tokens.",
    "enorm.",
    "hnorm.",
    "eh_proj.",
    "input_layernorm.",
    "self_attn.",
    "post_attention_layernorm.",
    "mlp.gate.weight",
    "mlp.gate.",
    "mlp.",
    "shared_head.",
)


@dataclass(frozen=True)
class ParameterCounts:
    """Numbers of parameters of a model, without FP8 scales."""

    total: int  # without the MTP modules
    active: int  # those that one token passes through: all but the experts it is not routed to
    mtp: int  # those of the MTP modules, with the copies of embedding and head that DeepSeek's hold


def released_tensors(config: ModelConfig, fp8: bool) -> list[TensorSpec]:
    """Every tensor of a released checkpoint of this model, layer by layer, the MTP modules last. ``fp8``: the
    projections of the decoder layers are float8_e4m3fn, each followed by its float32 block scales
    (``weight_block_size``, or 128×128 where the configuration names none); the router, the indexer's ``weights_proj``,
    ``eh_proj``, embeddings, the head and norms never are."""
    plain = _declared(config)
    return _in_fp8(plain, config) if fp8 else [replace(spec, quantized=False) for spec in plain]


def parameter_counts(config: ModelConfig) -> ParameterCounts:
    """Nothing is allocated."""
    everything = _declared(config)
    main = [spec for spec in everything if (_layer(spec.name) or 0) < config.num_hidden_layers]
    total = sum(spec.numel for spec in main)
    expert = 3 * config.hidden_size * config.moe_intermediate_size
    idle = (config.n_routed_experts - config.num_experts_per_tok) * expert * config.mlp_layer_types.count("sparse")
    return ParameterCounts(total, active=total - idle, mtp=sum(spec.numel for spec in everything) - total)


def _in_fp8(plain: Sequence[TensorSpec], config: ModelConfig) -> list[TensorSpec]:
    """The same tensors with each quantised weight replaced by FP8 codes and scales."""
    block_rows, block_columns = config.weight_block_size or RELEASED_BLOCK_SIZE
    specs = []
    for spec in plain:
        if spec.quantized:
            scales = (cdiv(spec.shape[0], block_rows), cdiv(spec.shape[1], block_columns))
            specs.append(TensorSpec(spec.name, spec.shape, FP8, quantized=True))
            specs.append(TensorSpec(f"{spec.name}_scale_inv", scales, torch.float32))
        else:
            specs.append(spec)
    return specs


def _declared(config: ModelConfig) -> list[TensorSpec]:
    """All tensors in plain numbers and in released order; ``quantized`` says which a release holds in FP8."""
    modules = config.num_nextn_predict_layers
    runtime = Runtime(Mesh(ParallelConfig(), 0, 1, _META), config.dtype, _Declaring(), workspace=0)
    model = Model(config, runtime, modules)
    specs = [spec for module in model.modules() if isinstance(module, Weighted) for spec in _specs(module, config)]
    for module in range(config.num_hidden_layers, config.num_hidden_layers + modules):
        # DeepSeek's MTP modules hold copies of the embedding and the head, which the model does not need.
        for name in () if config.model_type == "glm_moe_dsa" else ("embed_tokens", "shared_head.head"):
            table = (config.vocab_size, config.hidden_size)
            specs.append(TensorSpec(f"model.layers.{module}.{name}.weight", table, config.dtype))
    return sorted(specs, key=lambda spec: _position(spec.name, config.num_hidden_layers + modules))


def _specs(module: Weighted, config: ModelConfig) -> Iterator[TensorSpec]:
    for source in module.sources:
        # A Float32OutputLinear computes in float32 whatever the checkpoint holds; other float32 weights are stored so.
        stored_wide = source.into.dtype == torch.float32 and not isinstance(module, Float32OutputLinear)
        dtype = torch.float32 if stored_wide else config.dtype
        yield TensorSpec(source.name, source.shape, dtype, quantized=source.holds_codes)


def _layer(name: str) -> int | None:
    parts = name.split(".", 3)
    return int(parts[2]) if parts[1] == "layers" else None


def _position(name: str, layers: int) -> tuple[int, int]:
    """The sort key of a tensor: its layer, and its position in the layer."""
    layer = _layer(name)
    if layer is None:
        return {"model.embed_tokens.weight": (-1, 0), "model.norm.weight": (layers, 0)}.get(name, (layers, 1))
    inside = name.split(".", 3)[3]
    return layer, next(number for number, start in enumerate(_ORDER) if inside.startswith(start))


class _Declared(Linear, GroupedExperts):
    """Linear layers or experts that hold their sources and no memory."""

    tensors = ()

    def __init__(self, *parts: Matrix):
        self.sources = [Source(part.name, _CODES, (part.rows, part.columns)) for part in parts]

    def __call__(self, *_: object, **__: object) -> torch.Tensor:
        raise NotImplementedError

    def _mlp(self, *_: object, **__: object) -> torch.Tensor:
        raise NotImplementedError

    def dequantized(self) -> torch.Tensor:
        raise NotImplementedError


class _Declaring(WeightFormat):
    """Makes layers that only declare the weights that a release quantises."""

    def linear(self, *parts: Matrix) -> Linear:
        return _Declared(*parts)

    def experts(self, prefixes: Sequence[str], hidden: int, intermediate: int) -> GroupedExperts:
        return _Declared(
            *(
                Matrix(f"{prefix}.{name}.weight", *shape)
                for prefix in prefixes
                for name, shape in (
                    ("gate_proj", (intermediate, hidden)),
                    ("up_proj", (intermediate, hidden)),
                    ("down_proj", (hidden, intermediate)),
                )
            )
        )
