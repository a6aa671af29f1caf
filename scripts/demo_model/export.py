"""Writes a trained model as a checkpoint folder: weights in the released layout, the shipped tokenizer, its config."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from demo_model.model import TrainingModel
from dsa_engine.config.model import ModelConfig
from dsa_engine.demo import trained_folder
from dsa_engine.kernels.formats.fp8 import quantize_blocks
from dsa_engine.model.layout import released_tensors


def released_weights(model: TrainingModel) -> dict[str, torch.Tensor]:
    """Float32 tensors under their released names; the MTP module gets its copies of the embedding and the head."""
    weights: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict().items():
        prefix, stacked = name.rpartition(".")[::2]
        parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.get(stacked)
        if parts is None:
            weights[name] = tensor
            continue
        for i, expert in enumerate(tensor):
            for part, values in zip(parts, expert.chunk(len(parts)), strict=True):
                weights[f"{prefix}.{i}.{part}.weight"] = values
    mtp = f"model.layers.{model.config.num_hidden_layers}."
    weights[f"{mtp}embed_tokens.weight"] = weights["model.embed_tokens.weight"]
    weights[f"{mtp}shared_head.head.weight"] = weights["lm_head.weight"]
    return weights


def write_checkpoint(model: TrainingModel, raw: dict[str, Any], folder: Path) -> None:
    """Writes a folder that the engine loads: FP8 blocks if ``raw`` has a ``quantization_config``, else its dtype."""
    config = ModelConfig.from_dict(raw)
    weights, tensors = released_weights(model), {}
    power_of_two = (raw.get("quantization_config") or {}).get("scale_fmt") == "ue8m0"
    specs = iter(released_tensors(config, fp8=config.weight_block_size is not None))
    for spec in specs:
        values = weights.pop(spec.name).detach().float()
        if spec.quantized:
            assert config.weight_block_size is not None
            scales = next(specs).name  # a quantised weight is followed by its scales
            tensors[spec.name], tensors[scales] = quantize_blocks(values, config.weight_block_size, power_of_two)
        else:
            tensors[spec.name] = values.to(spec.dtype).clone()
    if weights:
        raise ValueError(f"the layout has no name for {', '.join(sorted(weights))}")
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")
    for name in ("generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(trained_folder() / name, folder)
