"""The options of ``dsa-engine route``."""

from __future__ import annotations

import argparse

from dsa_engine.arguments import add_options
from dsa_engine.router.options import RouterOptions


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("router")
    group.add_argument(
        "--replica",
        "--worker-urls",  # the name in SGLang's and vLLM's routers
        dest="replica",
        nargs="+",
        action="extend",
        required=True,
        default=argparse.SUPPRESS,
        metavar="URL",
        help="servers to send requests to, such as http://10.0.0.1:8000; may be repeated",
    )
    add_options(group, RouterOptions)
