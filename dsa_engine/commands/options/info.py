"""The options of ``dsa-engine info``."""

from __future__ import annotations

import argparse

from dsa_engine.config.released import RELEASED_CONFIGS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    names = ", ".join(RELEASED_CONFIGS)
    parser.add_argument("model", metavar="MODEL", help=f"a folder with a config.json, 'demo', or one of {names}")
    parser.add_argument("--hf-overrides", default="{}", metavar="JSON", help="keys that replace those of config.json")
    parser.add_argument("--memory", metavar="SIZE", help="memory of one rank, e.g. 141GB; default: this machine's")
    parser.add_argument("--ranks", type=int, default=1, help="ranks over which the experts are divided")
    parser.add_argument(
        "--tp-size", type=int, default=1, help="ranks that divide embedding, output projections and LM head"
    )
    parser.add_argument("--json", metavar="PATH", help="write the figures here too; '-': to standard output")
