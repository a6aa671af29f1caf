"""The options of ``dsa-engine convert``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import get_args

from dsa_engine.config.checks import DTYPE_NAMES
from dsa_engine.options import Quantization


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", type=Path, metavar="SOURCE", help="the checkpoint, in FP8 or plain, or its hub id")
    parser.add_argument("target", type=Path, metavar="TARGET", help="the folder to make")
    parser.add_argument("--dtype", choices=DTYPE_NAMES, help="dtype of plain weights (default: bfloat16)")
    parser.add_argument(
        "--quantize",
        choices=[name for name in get_args(Quantization) if name != "dequantize"],
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
