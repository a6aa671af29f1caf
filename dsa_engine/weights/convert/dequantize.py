"""Expands an FP8 checkpoint to plain numbers, for programs that cannot read the block format."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from dsa_engine.config.model import DTYPES, ModelConfig, read_config_json
from dsa_engine.errors import CheckpointError
from dsa_engine.kernels.formats.quantize import FP8
from dsa_engine.system.progress import progress_bar
from dsa_engine.weights.index import INDEX_NAME
from dsa_engine.weights.reader import SCALE_SUFFIX, CheckpointReader
from dsa_engine.weights.tensors import Source, TensorSpec
from dsa_engine.weights.writer import DEFAULT_SHARD_SIZE, SafetensorsWriter, WrittenCheckpoint

WEIGHT_SUFFIXES = {".safetensors", ".bin", ".pt", ".pth", ".gguf"}

# A tensor of the source in plain numbers, and the tensors of the target that replace it.
Plan = list[tuple[TensorSpec, list[TensorSpec]]]


def dequantize_checkpoint(
    source_folder: str | Path,
    target_folder: str | Path,
    *,
    dtype: torch.dtype = torch.bfloat16,
    max_shard_size: int | str = DEFAULT_SHARD_SIZE,
    progress: bool = False,
) -> WrittenCheckpoint:
    """Writes ``source_folder`` to ``target_folder`` with all FP8 weights expanded, one shard in memory at a time.

    Tensors that the source holds in float32 (``e_score_correction_bias``, ``k_norm``) stay float32, all others become
    ``dtype``. ``config.json`` loses its ``quantization_config`` and names ``dtype``; the other files of the folder
    (tokenizer, generation_config.json, …; no subfolders) are copied.

    Args:
        target_folder: must not exist, or be empty; appears when it is complete.
        dtype: bfloat16, float32 or float16.
        max_shard_size: bytes, or text such as "5GB".

    Raises:
        CheckpointError: the source is damaged or holds no FP8 weights, the target exists, the disk has too little room,
            or a value does not fit in ``dtype``.
        ValueError: ``dtype`` is not one of the three, or the configuration is not supported.
    """
    dtype_name = {value: name for name, value in DTYPES.items()}.get(dtype)
    if dtype_name is None:
        raise ValueError(f"cannot convert to {dtype}; supported are {', '.join(DTYPES)}")
    source_folder = Path(source_folder)
    raw = read_config_json(source_folder)
    with CheckpointReader(source_folder, ModelConfig.from_dict(raw).weight_block_size) as reader:
        specs, dequantized = plain_tensors(reader, dtype)
        if not dequantized:
            raise CheckpointError(f"{source_folder} holds no FP8 weights: there is nothing to convert")

        def values(spec: TensorSpec) -> list[torch.Tensor]:
            tensor = torch.empty(spec.shape, dtype=spec.dtype)
            reader.load(Source(spec.name, into=tensor, shape=spec.shape))
            return [tensor]

        raw.pop("quantization_config", None)
        for key in {"dtype", "torch_dtype"} & raw.keys() or {"torch_dtype"}:
            raw[key] = dtype_name
        plan = [(spec, [spec]) for spec in specs]
        return write_converted(source_folder, target_folder, plan, values, raw, max_shard_size, progress, dequantized)


def plain_tensors(reader: CheckpointReader, dtype: torch.dtype) -> tuple[list[TensorSpec], int]:
    """All tensors in plain numbers, in the order of the source's index, and the number of FP8 ones in the source."""
    specs: list[TensorSpec] = []
    dequantized = 0
    for name in reader.names():
        if name.endswith(SCALE_SUFFIX) and name.removesuffix(SCALE_SUFFIX) in reader.names():
            continue
        shape, stored = reader.describe(name)
        dequantized += stored == FP8
        specs.append(TensorSpec(name, shape, torch.float32 if stored == torch.float32 else dtype))
    return specs, dequantized


def write_converted(
    source_folder: Path,
    target_folder: str | Path,
    plan: Plan,
    values: Callable[[TensorSpec], list[torch.Tensor]],
    raw_config: dict[str, Any],
    max_shard_size: int | str,
    progress: bool,
    dequantized: int,
    quantized: int = 0,
) -> WrittenCheckpoint:
    """Writes a converted checkpoint: ``values`` makes the target's tensors for one of the source, ``raw_config`` is the
    target's ``config.json``, and ``dequantized`` and ``quantized`` weights change their format."""
    specs = [spec for _, targets in plan for spec in targets]
    with (
        SafetensorsWriter(target_folder, specs, max_shard_size=max_shard_size) as writer,
        progress_bar(len(plan), "tensors", "converting", progress) as bar,
    ):
        for spec, targets in plan:
            for target, tensor in zip(targets, values(spec), strict=True):
                writer.write(target.name, tensor)
            bar.update()
        writer.add_file("config.json", json.dumps(raw_config, indent=2, ensure_ascii=False) + "\n")
        for path in source_folder.iterdir():
            rewritten = path.name in ("config.json", INDEX_NAME) or path.suffix in WEIGHT_SUFFIXES
            if path.is_file() and not rewritten and not path.name.startswith("."):
                writer.add_file(path.name, path)
    return replace(writer.written, dequantized=dequantized, quantized=quantized)
