"""Rewrites an FP8 checkpoint (DeepSeek, GLM) with plain weights, in the Hugging Face layout.

Example:
    python scripts/convert_checkpoint.py /data/DeepSeek-V3.2-Exp /data/DeepSeek-V3.2-Exp-bf16 --dtype bfloat16
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

from dsa_engine.arguments import argument_parser, run
from dsa_engine.checkpoint import dequantize_checkpoint
from dsa_engine.measure.report import write_json
from dsa_engine.model.config import DTYPES
from dsa_engine.model_folder import resolve_model


def parse_arguments() -> argparse.Namespace:
    parser = argument_parser(__doc__)
    parser.add_argument("source", type=Path, metavar="SOURCE", help="the FP8 checkpoint, or its hub id")
    parser.add_argument("target", type=Path, metavar="TARGET", help="the folder to make")
    parser.add_argument(
        "--dtype", default="bfloat16", choices=list(DTYPES), help="of the new weights (default: bfloat16)"
    )
    parser.add_argument(
        "--max-shard-size", default="5GB", metavar="SIZE", help='bytes, or such as "512MiB" (default: 5GB)'
    )
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the report here")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    # So that a terminated run removes its temporary folder, as an interrupted one does.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    written = dequantize_checkpoint(
        resolve_model(arguments.source),
        arguments.target,
        dtype=DTYPES[arguments.dtype],
        max_shard_size=arguments.max_shard_size,
        progress=True,
    )
    if arguments.json:
        write_json(arguments.json, written.to_json())
    print(
        f"{written.folder}: {written.shards} weight file(s), {written.tensors:,} tensors "
        f"({written.dequantized:,} were FP8), {written.tensor_bytes:,} bytes"
    )


if __name__ == "__main__":
    run(main)
