"""``dsa-engine route``: one address in front of several servers."""

from __future__ import annotations

import argparse

from dsa_engine.arguments import add_options
from dsa_engine.commands.http_options import http_options
from dsa_engine.router.options import RouterOptions

_NEEDED = ("fastapi", "uvicorn", "prometheus_client", "httpx")


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


def run_route(args: argparse.Namespace) -> None:
    """Routes until SIGTERM or Ctrl-C.

    Raises:
        ValueError: an option is not possible, or a package is missing.
        OSError: the address cannot be listened at.
    """
    options = http_options("route", args, RouterOptions, _NEEDED, replica=args.replica)
    from dsa_engine.router.run import route

    route(options)
