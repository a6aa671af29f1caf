"""Rewrites a checkpoint: FP8 (DeepSeek, GLM) to plain weights, or with --quantize to FP8, INT8 or INT4 experts.

Examples:
    python scripts/convert_checkpoint.py /data/DeepSeek-V3.2-Exp /data/DeepSeek-V3.2-Exp-bf16 --dtype bfloat16
    python scripts/convert_checkpoint.py /data/DeepSeek-V3.2-Exp /data/V3.2-int8 --quantize int8 --calibration text.txt
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

import torch

from dsa_engine import LLM
from dsa_engine.arguments import argument_parser, read_text, run
from dsa_engine.checkpoint import WrittenCheckpoint
from dsa_engine.config.model import DTYPES, ModelConfig
from dsa_engine.convert import dequantize_checkpoint, quantize_checkpoint
from dsa_engine.convert.calibration import calibrate
from dsa_engine.convert.schemes import QUANTIZE
from dsa_engine.measure.report import write_json
from dsa_engine.model_folder import resolve_model


def parse_arguments() -> argparse.Namespace:
    parser = argument_parser(__doc__)
    parser.add_argument("source", type=Path, metavar="SOURCE", help="the checkpoint, in FP8 or plain, or its hub id")
    parser.add_argument("target", type=Path, metavar="TARGET", help="the folder to make")
    parser.add_argument("--dtype", choices=list(DTYPES), help="dtype of plain weights (default: bfloat16)")
    parser.add_argument(
        "--quantize",
        choices=QUANTIZE,
        help="fp8: the released block format; int8 (W8A8), int4-experts (W4A16): as compressed-tensors writes them; an "
        "interrupted run goes on when it is started again",
    )
    parser.add_argument("--int8-activations", action="store_true", help="int4-experts with INT8 activations: W4A8")
    parser.add_argument(
        "--calibration",
        metavar="FILE",
        help="a text to run the source on first: SmoothQuant moves wide ranges of activations into weights",
    )
    parser.add_argument(
        "--calibration-tokens", type=int, default=16384, metavar="N", help="tokens of the text to run (default: 16384)"
    )
    parser.add_argument(
        "--max-shard-size", default="5GB", metavar="SIZE", help='bytes, or such as "512MiB" (default: 5GB)'
    )
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the report here")
    args = parser.parse_args()
    if args.quantize and args.dtype:
        parser.error("--dtype is of plain weights; with --quantize what is not quantised keeps the model's dtype")
    if (args.calibration or args.int8_activations) and not args.quantize:
        parser.error("--calibration and --int8-activations need --quantize")
    if args.calibration and not (args.quantize == "int8" or args.int8_activations):
        parser.error("--calibration is of use where activations are quantised: int8, or int4-experts with W4A8")
    return args


def main() -> None:
    arguments = parse_arguments()
    # A terminated run removes its temporary folder or keeps it for a resumed run, as an interrupted one does.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    written = quantized(arguments) if arguments.quantize else plain(arguments)
    if arguments.json:
        write_json(arguments.json, written.to_json())
    print(
        f"{written.folder}: {written.shards} weight file(s), {written.tensors:,} tensors "
        f"({written.dequantized:,} were FP8, {written.quantized:,} weights were quantised), "
        f"{written.tensor_bytes:,} bytes"
    )


def plain(arguments: argparse.Namespace) -> WrittenCheckpoint:
    return dequantize_checkpoint(
        resolve_model(arguments.source),
        arguments.target,
        dtype=DTYPES[arguments.dtype or "bfloat16"],
        max_shard_size=arguments.max_shard_size,
        progress=True,
    )


def quantized(arguments: argparse.Namespace) -> WrittenCheckpoint:
    return quantize_checkpoint(
        resolve_model(arguments.source),
        arguments.target,
        arguments.quantize,
        int8_activations=arguments.int8_activations,
        statistics=statistics(arguments) if arguments.calibration else None,
        max_shard_size=arguments.max_shard_size,
        progress=True,
    )


def statistics(arguments: argparse.Namespace) -> dict[str, torch.Tensor]:
    text = read_text(arguments.calibration)
    source = resolve_model(arguments.source)
    stored = ModelConfig.from_pretrained(source).quantization
    llm = LLM(source, quantization="dequantize" if stored else None, max_num_seqs=1, enforce_eager=True)
    return calibrate(llm, text, arguments.calibration_tokens)


if __name__ == "__main__":
    run(main)
