"""Small checkpoints: one file or several with an index, FP8 weights with their scales."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from dsa_engine.kernels.formats.fp8 import dequantize_blocks, quantize_blocks

BLOCK = (16, 8)


def write(folder: Path, tensors: dict[str, torch.Tensor], name: str = "model.safetensors") -> Path:
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / name)
    return folder


def write_sharded(folder: Path, shards: dict[str, dict[str, torch.Tensor]]) -> Path:
    weight_map: dict[str, str] = {}
    for file, tensors in shards.items():
        write(folder, tensors, file)
        weight_map |= dict.fromkeys(tensors, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def fp8_tensors(name: str, shape: tuple[int, int], seed: int = 0) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The two stored tensors of an FP8 weight, and its expanded value."""
    weight, scale_inv = quantize_blocks(torch.randn(shape, generator=torch.Generator().manual_seed(seed)), BLOCK)
    return {name: weight, name + "_scale_inv": scale_inv}, dequantize_blocks(weight, scale_inv, BLOCK)
