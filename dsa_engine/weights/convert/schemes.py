"""The target schemes of ``--quantize``: quantised weights, their tensors, and the ``quantization_config``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from dsa_engine.config.keys import Keys
from dsa_engine.config.model import ModelConfig
from dsa_engine.config.quantization import QuantizationConfig
from dsa_engine.config.released import RELEASED_BLOCK_SIZE, RELEASED_QUANTIZATION
from dsa_engine.kernels.formats.fp8 import quantize_blocks, scale_shape
from dsa_engine.kernels.formats.int4 import check_groups, quantize_int4
from dsa_engine.kernels.formats.int8 import quantize_rows_int8_reference
from dsa_engine.kernels.formats.quantize import FP8
from dsa_engine.model.layout import released_tensors
from dsa_engine.weights.tensors import TensorSpec

GROUP_SIZE = 128
QUANTIZE = ("fp8", "int8", "int4-experts")

# The ``ignore`` list for compressed-tensors: weights that are never quantised, and kv_b_proj, which is absorbed into
# queries and values and so needed in plain numbers.
_PLAIN = ["lm_head", "re:.*mlp[.]gate$", "re:.*weights_proj$", "re:.*kv_b_proj$", "re:.*eh_proj$", "re:.*[.]head$"]


@dataclass(frozen=True)
class TargetScheme:
    """How a conversion stores a model."""

    quantized: frozenset[str]  # names of the weights, "….weight", that become codes
    block_rows: int  # rows that are quantised together; parts of a matrix have a multiple of this many rows
    specs: Callable[[TensorSpec], list[TensorSpec]]  # the tensors that replace a quantised weight
    encode: Callable[[torch.Tensor], Sequence[torch.Tensor]]  # their values for some rows, float32
    config: dict[str, Any]  # quantization_config


def target_scheme(quantize: str, config: ModelConfig, int8_activations: bool = False) -> TargetScheme:
    """The scheme of ``--quantize`` for a model: "fp8", the released block format; "int8", W8A8; or "int4-experts", in
    groups of 128, W4A16 or with ``int8_activations`` W4A8."""
    names = {spec.name: spec for spec in released_tensors(config, fp8=True) if spec.quantized}
    if int8_activations and quantize != "int4-experts":
        raise ValueError(f"INT8 activations are chosen with 'int4-experts' only; {quantize!r} has its own")
    if quantize == "fp8":
        blocks = partial(quantize_blocks, block_size=RELEASED_BLOCK_SIZE)
        return TargetScheme(frozenset(names), RELEASED_BLOCK_SIZE[0], _fp8_specs, blocks, RELEASED_QUANTIZATION)
    if quantize == "int8":
        quantized_names = frozenset(name for name in names if not name.endswith(".kv_b_proj.weight"))
        stored = _compressed_tensors("int-quantized", ["Linear"], 8, _INT8_ROWS, _PLAIN, strategy="channel")
        return TargetScheme(quantized_names, 1, _int8_specs, _int8_encode, stored)
    if quantize == "int4-experts":
        experts = frozenset(name for name in names if ".mlp.experts." in name)
        for name in experts:
            try:
                check_groups(names[name].shape[1], GROUP_SIZE)
            except ValueError as error:
                raise ValueError(f"{name!r} cannot be stored in INT4: {error}") from error
        dtype = config.dtype

        def specs(spec: TensorSpec) -> list[TensorSpec]:
            module, (rows, columns) = spec.name.removesuffix(".weight"), spec.shape
            return [
                TensorSpec(f"{module}.weight_packed", (rows, columns // 8), torch.int32),
                TensorSpec(f"{module}.weight_scale", (rows, columns // GROUP_SIZE), dtype),
                TensorSpec(f"{module}.weight_shape", (2,), torch.int64),
            ]

        encode = partial(quantize_int4, group_size=GROUP_SIZE, scale_dtype=dtype)
        targets, inputs = [r"re:.*mlp[.]experts[.]\d+[.].*_proj$"], _INT8_ROWS if int8_activations else None
        groups: dict[str, Any] = {"strategy": "group", "group_size": GROUP_SIZE}
        stored = _compressed_tensors("pack-quantized", targets, 4, inputs, [], **groups)
        return TargetScheme(experts, 1, specs, encode, stored)
    raise ValueError(f"there is no scheme {quantize!r}; there are {', '.join(QUANTIZE)}")


def _fp8_specs(spec: TensorSpec) -> list[TensorSpec]:
    shape = scale_shape((spec.shape[0], spec.shape[1]), RELEASED_BLOCK_SIZE)
    return [
        TensorSpec(spec.name, spec.shape, FP8, quantized=True),
        TensorSpec(f"{spec.name}_scale_inv", shape, torch.float32),
    ]


def _int8_specs(spec: TensorSpec) -> list[TensorSpec]:
    return [
        TensorSpec(spec.name, spec.shape, torch.int8),
        TensorSpec(f"{spec.name}_scale", (spec.shape[0], 1), torch.float32),
    ]


def _int8_encode(rows: torch.Tensor) -> list[torch.Tensor]:
    codes, scales = quantize_rows_int8_reference(rows)
    if not bool(torch.isfinite(scales).all()):
        raise ValueError("the weight holds NaN or infinity, which INT8 cannot represent")
    return [codes, scales[:, None]]


_INT8_ROWS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}


def _compressed_tensors(
    layout: str, targets: list[str], bits: int, inputs: dict[str, Any] | None, ignore: list[str], **strategy: Any
) -> dict[str, Any]:
    group = {
        "targets": targets,
        "weights": {"num_bits": bits, "type": "int", "symmetric": True, "dynamic": False} | strategy,
        "input_activations": inputs,
        "output_activations": None,
        "format": layout,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ignore,
        "kv_cache_scheme": None,
    }


def stored_as(quantize: str, config: ModelConfig) -> QuantizationConfig | None:
    """The configuration that a checkpoint made by :func:`target_scheme` would have."""
    return QuantizationConfig.from_keys(Keys({"quantization_config": target_scheme(quantize, config).config}))
