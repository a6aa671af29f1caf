"""Random checkpoints in the released layout, of any size, for tests, benchmarks and the demo model.

The weights are scaled so that the untrained model behaves: every projection preserves the variance of its input,
attention logits have a standard deviation of about one or more, and index scores differ between tokens, so that the
selection matters.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from dsa_engine.config.model import ModelConfig
from dsa_engine.config.released import RELEASED_QUANTIZATION
from dsa_engine.kernels.formats.fp8 import quantize_blocks
from dsa_engine.model.layout import released_tensors
from dsa_engine.system.progress import progress_bar
from dsa_engine.weights.dummy import fill_normal
from dsa_engine.weights.tensors import Source, TensorSpec
from dsa_engine.weights.writer import DEFAULT_SHARD_SIZE, SafetensorsWriter, WrittenCheckpoint

# Layers add little to the residual, as in a trained model (and in GPT-2's initialisation). A near tie in the selection
# that rounding breaks differently then affects its row only and does not grow over layers.
RESIDUAL_GAIN = 0.15


def write_random_checkpoint(
    folder: str | Path,
    raw_config: dict[str, Any],
    *,
    seed: int = 0,
    fp8: bool,
    max_shard_size: int | str = DEFAULT_SHARD_SIZE,
    progress: bool = False,
    extra_files: Mapping[str, str | bytes] | None = None,
) -> WrittenCheckpoint:
    """Writes a random checkpoint; the same arguments give the same bytes.

    Args:
        folder: the folder to make; it must not exist, or be empty.
        fp8: projections in FP8 blocks, with the ``quantization_config`` of ``raw_config`` or else the released one;
            otherwise everything in the configuration's dtype, and no ``quantization_config``.
        extra_files: further small files (name to content), for example of a tokenizer.
    """
    raw = dict(raw_config)
    quantization = raw.pop("quantization_config", None)
    if fp8:
        raw["quantization_config"] = quantization or RELEASED_QUANTIZATION
    config = ModelConfig.from_dict(raw)
    power_of_two = fp8 and raw["quantization_config"].get("scale_fmt") == "ue8m0"
    specs = list(released_tensors(config, fp8))
    with (
        SafetensorsWriter(folder, specs, max_shard_size=max_shard_size) as writer,
        progress_bar(len(specs), "tensors", "writing", progress) as bar,
    ):
        remaining = iter(specs)
        for spec in remaining:
            bar.update()
            values = _random_values(spec, config, seed)
            if not spec.quantized:
                writer.write(spec.name, values.to(spec.dtype))
                continue
            assert config.weight_block_size is not None
            scale_spec = next(remaining)  # a quantised weight is followed by its scales
            bar.update()
            weight, scale_inv = quantize_blocks(values, config.weight_block_size, power_of_two)
            writer.write(spec.name, weight)
            writer.write(scale_spec.name, scale_inv)
        writer.add_file("config.json", json.dumps(raw, indent=2) + "\n")
        for name, content in (extra_files or {}).items():
            writer.add_file(name, content)
    return writer.written


def _random_values(spec: TensorSpec, config: ModelConfig, seed: int) -> torch.Tensor:
    """The float32 values of a tensor, which depend only on the seed and the tensor's name."""
    values = torch.empty(spec.shape)
    name, mean = spec.name, 0.0
    if name.endswith("norm.weight"):
        mean, std = 1.0, 0.1
    elif name.endswith("bias"):
        std = 0.1
    elif name.endswith("embed_tokens.weight"):
        # The MTP module of a released model holds copies of the embedding and the head.
        name, std = "model.embed_tokens.weight", 1.0
    else:
        if name.endswith("shared_head.head.weight"):
            name = "model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"
        std = spec.shape[-1] ** -0.5
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            std *= RESIDUAL_GAIN
    fill_normal(Source(name, into=values, shape=spec.shape), seed, std, mean)
    return values
