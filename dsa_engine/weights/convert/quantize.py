"""Quantises a checkpoint of any size in the memory of one shard and its largest tensor."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from dsa_engine.config.model import ModelConfig, read_config_json
from dsa_engine.errors import CheckpointError
from dsa_engine.weights.convert.dequantize import plain_tensors, write_converted
from dsa_engine.weights.convert.schemes import TargetScheme, target_scheme
from dsa_engine.weights.convert.smooth import Smoothing
from dsa_engine.weights.reader import CHUNK_ELEMENTS, CheckpointReader
from dsa_engine.weights.tensors import Source, TensorSpec
from dsa_engine.weights.writer import DEFAULT_SHARD_SIZE, WrittenCheckpoint


def quantize_checkpoint(
    source_folder: str | Path,
    target_folder: str | Path,
    quantize: str,
    *,
    int8_activations: bool = False,
    statistics: Mapping[str, torch.Tensor] | None = None,
    max_shard_size: int | str = DEFAULT_SHARD_SIZE,
    progress: bool = False,
) -> WrittenCheckpoint:
    """Writes ``source_folder`` to ``target_folder`` with its projections quantised.

    Other tensors become the configuration's dtype, except that float32 stays float32. Memory holds one shard of
    the target and a few times 64 MiB. Other files are copied, as by :func:`.dequantize.dequantize_checkpoint`.

    Args:
        source_folder: a checkpoint in plain numbers or in released FP8.
        target_folder: must not exist, or be empty; appears when it is complete.
        quantize, int8_activations: see :func:`.schemes.target_scheme`.
        statistics: the largest magnitude of each input channel, by the name of the weight ("….weight"), from running
            the source on a text (:mod:`dsa_engine.weights.convert.calibration`). They serve to move ranges of
            activations into weights first (:class:`.smooth.Smoothing`).
        max_shard_size: bytes, or text such as "5GB".

    Raises:
        CheckpointError: the source is damaged or already quantised, the target exists, or the disk has too little room.
        ValueError: an unknown scheme, sizes that it cannot store, NaN or infinity in a weight; the text names it.
    """
    source_folder = Path(source_folder)
    raw = read_config_json(source_folder)
    config = ModelConfig.from_dict(raw)
    if config.quantization is not None and (config.weight_block_size is None or quantize == "fp8"):
        raise CheckpointError(
            f"{source_folder} is quantised already ({config.quantization.schemes[0].name}); convert from a checkpoint "
            "in plain numbers, or from released FP8 to int8 or int4-experts"
        )
    scheme = target_scheme(quantize, config, int8_activations)
    with CheckpointReader(source_folder, config.weight_block_size) as reader:
        stored, dequantized = plain_tensors(reader, config.dtype)
        plan = [(spec, scheme.specs(spec) if spec.name in scheme.quantized else [spec]) for spec in stored]
        # A checkpoint may come without its MTP module.
        mtp = range(config.num_hidden_layers, config.num_hidden_layers + config.num_nextn_predict_layers)
        optional = tuple(f"model.layers.{i}." for i in mtp)
        present = {spec.name for spec in stored}
        missing = [name for name in scheme.quantized if name not in present and not name.startswith(optional)]
        if missing:
            raise CheckpointError(f"{source_folder} has no tensor {min(missing)!r}, which config.json implies")
        smoothing = Smoothing.of(config, scheme.quantized, statistics or {}, reader)
        return write_converted(
            source_folder,
            target_folder,
            plan,
            lambda spec: _values(spec, reader, scheme, smoothing),
            raw | {"quantization_config": scheme.config},
            max_shard_size,
            progress,
            dequantized,
            quantized=len(present & scheme.quantized),
        )


def _values(
    spec: TensorSpec, reader: CheckpointReader, scheme: TargetScheme, smoothing: Smoothing
) -> list[torch.Tensor]:
    quantized = spec.name in scheme.quantized
    targets = scheme.specs(spec) if quantized else [spec]
    values = [torch.empty(target.shape, dtype=target.dtype) for target in targets]
    per_row = max(1, spec.numel // spec.shape[0])
    step = max(1, CHUNK_ELEMENTS // per_row // scheme.block_rows) * scheme.block_rows
    for first in range(0, spec.shape[0], step):
        shape = (min(step, spec.shape[0] - first), *spec.shape[1:])
        rows = torch.empty(shape)
        reader.load(Source(spec.name, rows, spec.shape, (first, *(0 for _ in shape[1:]))))
        smoothing.apply(spec.name, rows, first)
        try:
            made = scheme.encode(rows) if quantized else [rows]
        except ValueError as error:
            raise ValueError(f"{spec.name!r}: {error}") from error
        for into, part in zip(values, made, strict=False):
            start = first if into.shape[0] == spec.shape[0] else first // scheme.block_rows
            into[start : start + part.shape[0]].copy_(part)
    if len(values) == 3:  # packed: the shape before packing
        values[2].copy_(torch.tensor(spec.shape))
    return values
