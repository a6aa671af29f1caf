"""``dsa-engine convert``: a checkpoint in another format."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from dsa_engine.commands.arguments import read_text
from dsa_engine.config.checks import DTYPE_NAMES
from dsa_engine.measure.report import write_json
from dsa_engine.options import Quantization
from dsa_engine.system.interrupts import ends_when_terminated
from dsa_engine.system.output_files import check_outputs

if TYPE_CHECKING:
    import torch

    from dsa_engine.weights import WrittenCheckpoint


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", type=Path, metavar="SOURCE", help="the checkpoint, in FP8 or plain, or its hub id")
    parser.add_argument("target", type=Path, metavar="TARGET", help="the folder to make")
    parser.add_argument("--dtype", choices=DTYPE_NAMES, help="dtype of plain weights (default: bfloat16)")
    parser.add_argument(
        "--quantize",
        choices=[name for name in get_args(Quantization) if name != "dequantize"],
        help="fp8: the released block format; int8 (W8A8), int4-experts (W4A16): as compressed-tensors writes them",
    )
    parser.add_argument("--int8-activations", action="store_true", help="int4-experts with INT8 activations: W4A8")
    about = "a text to run the source on first: SmoothQuant moves wide ranges of activations into weights"
    parser.add_argument("--calibration", metavar="FILE", help=about)
    parser.add_argument("--calibration-tokens", type=int, default=16384, metavar="N", help="tokens of that text to run")
    parser.add_argument("--max-shard-size", default="5GB", metavar="SIZE", help='bytes, or such as "512MiB"')
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the report here")


def run_convert(args: argparse.Namespace) -> None:
    _check(args)
    check_outputs(args.json)
    with ends_when_terminated():
        written = _written(args)
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


def _written(args: argparse.Namespace) -> WrittenCheckpoint:
    from dsa_engine.config.model import DTYPES
    from dsa_engine.weights.convert import dequantize_checkpoint, quantize_checkpoint
    from dsa_engine.weights.model_folder import resolve_model

    source, how = resolve_model(args.source), {"max_shard_size": args.max_shard_size, "progress": True}
    if not args.quantize:
        return dequantize_checkpoint(source, args.target, dtype=DTYPES[args.dtype or "bfloat16"], **how)
    statistics = _statistics(args, source) if args.calibration else None
    how |= {"int8_activations": args.int8_activations, "statistics": statistics}
    return quantize_checkpoint(source, args.target, args.quantize, **how)


def _statistics(args: argparse.Namespace, source: Path) -> dict[str, torch.Tensor]:
    from dsa_engine.config.model import ModelConfig
    from dsa_engine.llm import LLM
    from dsa_engine.weights.convert.calibration import calibrate

    text = read_text(args.calibration)
    stored = ModelConfig.from_pretrained(source).quantization
    llm = LLM(source, quantization="dequantize" if stored else None, max_num_seqs=1, enforce_eager=True)
    return calibrate(llm, text, args.calibration_tokens)
