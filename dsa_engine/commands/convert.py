"""``dsa-engine convert``: a checkpoint in another format."""

from __future__ import annotations

import argparse

import torch

from dsa_engine.arguments import read_text
from dsa_engine.checkpoint import WrittenCheckpoint
from dsa_engine.config.model import DTYPES, ModelConfig
from dsa_engine.convert import dequantize_checkpoint, quantize_checkpoint
from dsa_engine.convert.calibration import calibrate
from dsa_engine.llm import LLM
from dsa_engine.measure.report import write_json
from dsa_engine.model_folder import resolve_model
from dsa_engine.system.interrupts import ends_when_terminated
from dsa_engine.system.output_files import check_outputs


def run_convert(args: argparse.Namespace) -> None:
    """Writes the folder and prints what it holds.

    Raises:
        ValueError, OSError: an option, the checkpoint or a file is not possible.
    """
    _check(args)
    check_outputs(args.json)
    with ends_when_terminated():
        written = _quantized(args) if args.quantize else _plain(args)
    if args.json:
        write_json(args.json, written.to_json())
    print(
        f"{written.folder}: {written.shards} weight file(s), {written.tensors:,} tensors "
        f"({written.dequantized:,} were FP8, {written.quantized:,} weights were quantised), "
        f"{written.tensor_bytes:,} bytes"
    )


def _check(args: argparse.Namespace) -> None:
    if args.quantize and args.dtype:
        raise ValueError("--dtype is of plain weights; with --quantize what is not quantised keeps the model's dtype")
    if (args.calibration or args.int8_activations) and not args.quantize:
        raise ValueError("--calibration and --int8-activations need --quantize")
    if args.calibration and not (args.quantize == "int8" or args.int8_activations):
        raise ValueError("--calibration is of use where activations are quantised: int8, or int4-experts with W4A8")


def _plain(args: argparse.Namespace) -> WrittenCheckpoint:
    return dequantize_checkpoint(
        resolve_model(args.source),
        args.target,
        dtype=DTYPES[args.dtype or "bfloat16"],
        max_shard_size=args.max_shard_size,
        progress=True,
    )


def _quantized(args: argparse.Namespace) -> WrittenCheckpoint:
    return quantize_checkpoint(
        resolve_model(args.source),
        args.target,
        args.quantize,
        int8_activations=args.int8_activations,
        statistics=_statistics(args) if args.calibration else None,
        max_shard_size=args.max_shard_size,
        progress=True,
    )


def _statistics(args: argparse.Namespace) -> dict[str, torch.Tensor]:
    text = read_text(args.calibration)
    source = resolve_model(args.source)
    stored = ModelConfig.from_pretrained(source).quantization
    llm = LLM(source, quantization="dequantize" if stored else None, max_num_seqs=1, enforce_eager=True)
    return calibrate(llm, text, args.calibration_tokens)
