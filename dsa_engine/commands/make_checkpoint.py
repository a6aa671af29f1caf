"""``dsa-engine make-checkpoint``: random weights in the released layout, for any configuration."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from dsa_engine.commands.arguments import json_object
from dsa_engine.config.overrides import merge_overrides
from dsa_engine.config.released import RELEASED_CONFIGS, released_config
from dsa_engine.errors import CheckpointError
from dsa_engine.measure.report import write_json
from dsa_engine.system.interrupts import ends_when_terminated
from dsa_engine.system.output_files import check_outputs

_NAMES = ("demo", *RELEASED_CONFIGS)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    known = f"a config.json, its folder, or one of: {', '.join(_NAMES)}"
    parser.add_argument("--config", required=True, metavar="PATH|NAME", help=known)
    parser.add_argument("--overrides", default="{}", metavar="JSON", help="keys that replace the configuration's")
    parser.add_argument("--output", required=True, type=Path, metavar="DIR", help="the folder to make")
    dtypes = ("fp8", "bfloat16", "float32")
    parser.add_argument("--dtype", default="fp8", choices=dtypes, help="dtype of the weights")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights")
    parser.add_argument("--max-shard-size", default="5GB", metavar="SIZE", help='bytes, or such as "512MiB"')
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the report here")


def run_make_checkpoint(args: argparse.Namespace) -> None:
    """Writes the folder, whole or not at all, and prints what it holds."""
    from dsa_engine.config.model import DTYPES
    from dsa_engine.demo import demo_files
    from dsa_engine.demo.random_checkpoint import write_random_checkpoint

    check_outputs(args.json)
    raw = merge_overrides(_read_config(args.config), json_object(args.overrides, "--overrides"))
    if args.dtype in DTYPES:
        raw.pop("dtype", None)
        raw["torch_dtype"] = args.dtype
    with ends_when_terminated():
        # The demo's tokenizer knows 260 ids, so it serves only the demo's vocabulary.
        files = demo_files() if args.config == "demo" else None
        how = {"max_shard_size": args.max_shard_size, "progress": True, "extra_files": files}
        written = write_random_checkpoint(args.output, raw, seed=args.seed, fp8=args.dtype == "fp8", **how)
    if args.json:
        write_json(args.json, written.to_json())
    held = f"{written.shards} weight file(s), {written.tensors:,} tensors, {written.tensor_bytes:,} bytes"
    print(f"{written.folder}: {held}")


def _read_config(config: str) -> dict[str, Any]:
    from dsa_engine.demo import demo_config

    if config in _NAMES:
        return demo_config() if config == "demo" else released_config(config)
    path = Path(config) / "config.json" if Path(config).is_dir() else Path(config)
    if not path.is_file():
        raise CheckpointError(f"--config {config}: no such file, and not one of {', '.join(_NAMES)}")
    return json_object(path.read_text(encoding="utf-8"), str(path))
