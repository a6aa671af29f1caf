"""Writes a checkpoint with random weights in the released layout, for any configuration.

Examples:
    python scripts/make_checkpoint.py --config demo --output /tmp/demo
    python scripts/make_checkpoint.py --config deepseek_v32 --overrides '{"num_hidden_layers": 4}' --output /data/v32-4
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path
from typing import Any

from dsa_engine.arguments import argument_parser, json_object, run
from dsa_engine.config.model import DTYPES
from dsa_engine.config.overrides import merge_overrides
from dsa_engine.config.released import RELEASED_CONFIGS, released_config
from dsa_engine.demo import demo_config, demo_files
from dsa_engine.demo.random_checkpoint import write_random_checkpoint
from dsa_engine.errors import CheckpointError
from dsa_engine.measure.report import write_json


def parse_arguments() -> argparse.Namespace:
    parser = argument_parser(__doc__)
    names = ", ".join(["demo", *RELEASED_CONFIGS])
    parser.add_argument(
        "--config", required=True, metavar="PATH|NAME", help=f"a config.json, its folder, or one of: {names}"
    )
    parser.add_argument(
        "--overrides", default="{}", metavar="JSON", help="keys that replace those of the configuration"
    )
    parser.add_argument("--output", required=True, type=Path, metavar="DIR", help="the folder to make")
    parser.add_argument(
        "--dtype", default="fp8", choices=["fp8", "bfloat16", "float32"], help="dtype of the weights (default: fp8)"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights (default: 0)")
    parser.add_argument(
        "--max-shard-size", default="5GB", metavar="SIZE", help='bytes, or such as "512MiB" (default: 5GB)'
    )
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the report here")
    return parser.parse_args()


def read_config(config: str, overrides: str) -> dict[str, Any]:
    if config == "demo":
        raw = demo_config()
    elif config in RELEASED_CONFIGS:
        raw = released_config(config)
    else:
        path = Path(config) / "config.json" if Path(config).is_dir() else Path(config)
        if not path.is_file():
            names = ", ".join(["demo", *RELEASED_CONFIGS])
            raise CheckpointError(f"--config {config}: no such file, and not one of {names}")
        raw = json_object(path.read_text(encoding="utf-8"), str(path))
    return merge_overrides(raw, json_object(overrides, "--overrides"))


def main() -> None:
    arguments = parse_arguments()
    # A terminated run removes its temporary folder, as an interrupted one does.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    raw = read_config(arguments.config, arguments.overrides)
    if arguments.dtype in DTYPES:
        raw.pop("dtype", None)
        raw["torch_dtype"] = arguments.dtype
    written = write_random_checkpoint(
        arguments.output,
        raw,
        seed=arguments.seed,
        fp8=arguments.dtype == "fp8",
        max_shard_size=arguments.max_shard_size,
        progress=True,
        # The demo's tokenizer knows 260 ids, so it serves only the demo's vocabulary.
        extra_files=demo_files() if arguments.config == "demo" else None,
    )
    if arguments.json:
        write_json(arguments.json, written.to_json())
    print(
        f"{written.folder}: {written.shards} weight file(s), {written.tensors:,} tensors, "
        f"{written.tensor_bytes:,} bytes"
    )


if __name__ == "__main__":
    run(main)
