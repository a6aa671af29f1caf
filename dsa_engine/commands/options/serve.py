"""The options of ``dsa-engine serve``."""

from __future__ import annotations

import argparse

from dsa_engine.arguments import add_engine_arguments, add_options
from dsa_engine.server.options import ServerOptions


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model_tag", nargs="?", metavar="MODEL", help="the model to serve, as --model takes it (default: demo)"
    )
    group = parser.add_argument_group("server")
    add_options(group, ServerOptions)
    group.add_argument(
        "--served-model-name", nargs="+", metavar="NAME", help="names of the model; default: MODEL as it is given"
    )
    add_engine_arguments(parser)
