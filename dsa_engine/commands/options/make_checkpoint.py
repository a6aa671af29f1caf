"""The options of ``dsa-engine make-checkpoint``."""

from __future__ import annotations

import argparse
from pathlib import Path

from dsa_engine.config.released import RELEASED_CONFIGS


def add_arguments(parser: argparse.ArgumentParser) -> None:
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
