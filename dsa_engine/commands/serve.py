"""``dsa-engine serve``: OpenAI's API over HTTP. With several ranks, rank 0 serves and the others follow."""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import nullcontext
from dataclasses import replace
from importlib.util import find_spec

from dsa_engine.arguments import llm_from, options_from
from dsa_engine.server.options import ServerOptions

_NEEDED = ("fastapi", "uvicorn", "prometheus_client")
KEY_VARIABLE = "DSA_ENGINE_API_KEY"


def run_serve(args: argparse.Namespace) -> None:
    """Serves until SIGTERM or Ctrl-C.

    Raises:
        ValueError: an option is not possible, or a package is missing.
        OSError: the address cannot be listened at.
    """
    if missing := [name for name in _NEEDED if find_spec(name) is None]:
        raise ValueError(f'serve needs {", ".join(missing)}: pip install "dsa-engine[serve]"')
    options = ServerOptions(**options_from(args, ServerOptions), served_model_name=args.served_model_name)
    if options.api_key is None and os.environ.get(KEY_VARIABLE):
        options = replace(options, api_key=os.environ[KEY_VARIABLE])
    args.model = args.model_tag or args.model
    from dsa_engine.engine.stats_log import StatsLog
    from dsa_engine.server.run import ignore_signals, serve

    llm = llm_from(args)
    if llm.engine.mesh.rank > 0:
        ignore_signals()
        llm.follow()
        return
    with llm, nullcontext() if options.disable_log_stats else StatsLog(llm.engine):
        served = serve(llm, options)
    if not served:
        sys.exit(1)
