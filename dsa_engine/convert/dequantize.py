"""Expands an FP8 checkpoint to plain numbers, for programs that cannot read the block format."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import torch

from dsa_engine.checkpoint.index import INDEX_NAME
from dsa_engine.checkpoint.reader import SCALE_SUFFIX, CheckpointReader, Source
from dsa_engine.checkpoint.tensor_spec import TensorSpec
from dsa_engine.checkpoint.writer import DEFAULT_SHARD_SIZE, SafetensorsWriter, WrittenCheckpoint
from dsa_engine.config.model import DTYPES, ModelConfig, read_config_json
from dsa_engine.errors import CheckpointError
from dsa_engine.kernels.formats.quantize import FP8
from dsa_engine.system.progress import progress_bar

WEIGHT_SUFFIXES = {".safetensors", ".bin", ".pt", ".pth", ".gguf"}


def dequantize_checkpoint(
    source_folder: str | Path,
    target_folder: str | Path,
    *,
    dtype: torch.dtype = torch.bfloat16,
    max_shard_size: int | str = DEFAULT_SHARD_SIZE,
    progress: bool = False,
) -> WrittenCheckpoint:
    """Writes ``source_folder`` to ``target_folder`` with all FP8 weights expanded, one tensor in memory at a time.

    Tensors that the source holds in float32 (``e_score_correction_bias``, ``k_norm``) stay float32, all others become
    ``dtype``. ``config.json`` loses its ``quantization_config`` and names ``dtype``; the other files of the folder
    (tokenizer, generation_config.json, …; no subfolders) are copied.

    Args:
        source_folder: an FP8 checkpoint.
        target_folder: must not exist, or be empty; appears when it is complete.
        dtype: bfloat16, float32 or float16.
        max_shard_size: bytes, or text such as "5GB".
        progress: show a progress bar on stderr.

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
    block_size = ModelConfig.from_dict(raw).weight_block_size
    with CheckpointReader(source_folder, block_size) as reader:
        specs, dequantized = plain_tensors(reader, dtype)
        if not dequantized:
            raise CheckpointError(f"{source_folder} holds no FP8 weights: there is nothing to convert")
        resume = json.dumps([str(source_folder.resolve()), raw, dtype_name])
        with (
            SafetensorsWriter(target_folder, specs, max_shard_size=max_shard_size, resume=resume) as writer,
            progress_bar(len(specs), "tensors", "converting", progress) as bar,
        ):
            for spec in specs:
                if not writer.done(spec.name):
                    writer.write(spec.name, _load(reader, spec))
                bar.update()
            raw.pop("quantization_config", None)
            for key in {"dtype", "torch_dtype"} & raw.keys() or {"torch_dtype"}:
                raw[key] = dtype_name
            writer.add_file("config.json", json.dumps(raw, indent=2, ensure_ascii=False) + "\n")
            for path in copied_files(source_folder):
                writer.add_file(path.name, path)
    return replace(writer.written, dequantized=dequantized)


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


def _load(reader: CheckpointReader, spec: TensorSpec) -> torch.Tensor:
    tensor = torch.empty(spec.shape, dtype=spec.dtype)
    reader.load(Source(spec.name, into=tensor, shape=spec.shape))
    # Only float16 has a smaller range than the stored dtypes.
    if spec.dtype == torch.float16 and not bool(torch.isfinite(tensor).all()):
        raise CheckpointError(
            f"{spec.name!r} holds values beyond the range of float16 (65504); use bfloat16 or float32"
        )
    return tensor


def copied_files(folder: Path) -> list[Path]:
    """The files that a conversion copies: tokenizer, generation_config.json, …."""
    rewritten = ("config.json", INDEX_NAME)
    return [
        path
        for path in sorted(folder.iterdir())
        if path.is_file()
        and path.suffix not in WEIGHT_SUFFIXES
        and path.name not in rewritten
        and not path.name.startswith(".")
    ]
