"""Writes a trained model as a checkpoint in the released layout, and reads one back for evaluation."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from demo_model.model import TrainingModel
from dsa_engine.checkpoint import CheckpointReader, SafetensorsWriter, Source, WrittenCheckpoint
from dsa_engine.config.model import ModelConfig
from dsa_engine.kernels.formats.fp8 import quantize_blocks
from dsa_engine.model.layout import released_tensors


def released_weights(model: TrainingModel) -> dict[str, torch.Tensor]:
    """Float32 tensors under their released names; the MTP module gets its copies of the embedding and the head."""
    weights: dict[str, torch.Tensor] = {}
    state = {name: tensor.detach().float() for name, tensor in model.state_dict().items()}
    for name, tensor in state.items():
        if name.endswith("experts.gate_up"):
            for i, both in enumerate(tensor):
                gate, up = both.chunk(2)
                prefix = f"{name.removesuffix('gate_up')}{i}."
                weights |= {f"{prefix}gate_proj.weight": gate, f"{prefix}up_proj.weight": up}
        elif name.endswith("experts.down"):
            weights |= {f"{name.removesuffix('down')}{i}.down_proj.weight": down for i, down in enumerate(tensor)}
        else:
            weights[name] = tensor
    config = model.config
    for i in range(config.num_hidden_layers, config.num_hidden_layers + config.num_nextn_predict_layers):
        weights[f"model.layers.{i}.embed_tokens.weight"] = weights["model.embed_tokens.weight"]
        weights[f"model.layers.{i}.shared_head.head.weight"] = weights["lm_head.weight"]
    return weights


def load_checkpoint(folder: str | Path) -> TrainingModel:
    """The model of a checkpoint folder, in float32; FP8 blocks are expanded."""
    config = ModelConfig.from_pretrained(folder)
    model = TrainingModel(config, seed=0)
    tensors: dict[str, torch.Tensor] = {}
    with CheckpointReader(folder, config.weight_block_size) as reader:
        for spec in released_tensors(config, fp8=False):
            tensors[spec.name] = torch.empty(spec.shape)
            reader.load(Source(spec.name, into=tensors[spec.name], shape=spec.shape))
    state: dict[str, torch.Tensor] = {}
    for name in model.state_dict():
        prefix = name.removesuffix("gate_up").removesuffix("down")
        experts = range(config.n_routed_experts)
        if name.endswith("experts.gate_up"):
            pairs = (
                (tensors[f"{prefix}{i}.gate_proj.weight"], tensors[f"{prefix}{i}.up_proj.weight"]) for i in experts
            )
            state[name] = torch.stack([torch.cat(pair) for pair in pairs])
        elif name.endswith("experts.down"):
            state[name] = torch.stack([tensors[f"{prefix}{i}.down_proj.weight"] for i in experts])
        else:
            state[name] = tensors[name]
    model.load_state_dict(state)
    return model


def write_checkpoint(
    model: TrainingModel, raw_config: dict[str, Any], folder: str | Path, extra_files: Mapping[str, str | bytes]
) -> WrittenCheckpoint:
    """Writes the released layout: FP8 blocks if ``raw_config`` has a ``quantization_config``, else its dtype.

    Args:
        model: the trained model.
        raw_config: the keys of ``config.json``.
        folder: folder to write; it must not exist, or be empty.
        extra_files: small files beside the weights, name to content.
    """
    config = ModelConfig.from_dict(raw_config)
    weights = released_weights(model)
    power_of_two = (raw_config.get("quantization_config") or {}).get("scale_fmt") == "ue8m0"
    specs = list(released_tensors(config, fp8=config.weight_block_size is not None))
    with SafetensorsWriter(folder, specs) as writer:
        remaining = iter(specs)
        for spec in remaining:
            values = weights.pop(spec.name)
            if not spec.quantized:
                writer.write(spec.name, values.to(spec.dtype))
                continue
            assert config.weight_block_size is not None
            weight, scale_inv = quantize_blocks(values, config.weight_block_size, power_of_two)
            writer.write(spec.name, weight)
            writer.write(next(remaining).name, scale_inv)  # a quantised weight is followed by its scales
        if weights:
            raise ValueError(f"the layout has no name for {', '.join(sorted(weights))}")
        writer.add_file("config.json", json.dumps(raw_config, indent=2) + "\n")
        for name, content in extra_files.items():
            writer.add_file(name, content)
    return writer.written
