"""``dsa-engine route``: one address in front of several servers."""

from __future__ import annotations

import argparse
import os
from dataclasses import replace
from importlib.util import find_spec

from dsa_engine.arguments import options_from
from dsa_engine.router.options import RouterOptions

_NEEDED = ("fastapi", "uvicorn", "prometheus_client", "httpx")
_KEY_VARIABLE = "DSA_ENGINE_API_KEY"


def run_route(args: argparse.Namespace) -> None:
    """Routes until SIGTERM or Ctrl-C.

    Raises:
        ValueError: an option is not possible, or a package is missing.
        OSError: the address cannot be listened at.
    """
    if missing := [name for name in _NEEDED if find_spec(name) is None]:
        raise ValueError(f'route needs {", ".join(missing)}: pip install "dsa-engine[serve]"')
    options = RouterOptions(**options_from(args, RouterOptions), replica=args.replica)
    if options.api_key is None and os.environ.get(_KEY_VARIABLE):
        options = replace(options, api_key=os.environ[_KEY_VARIABLE])
    from dsa_engine.router.run import route

    route(options)
