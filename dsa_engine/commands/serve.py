"""``dsa-engine serve``: the APIs of OpenAI and Anthropic. With several ranks, rank 0 serves and the others follow."""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
import threading
from contextlib import nullcontext
from dataclasses import replace
from importlib.util import find_spec

from dsa_engine.commands.arguments import add_engine_arguments, add_options, llm_from, options_from
from dsa_engine.commands.early import Early, leads
from dsa_engine.server.options import ServerOptions, bind, read_template

KEY_VARIABLE = "DSA_ENGINE_API_KEY"
_NEEDED = ("fastapi", "uvicorn", "httptools", "prometheus_client", "zmq", "msgspec")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model_tag", nargs="?", metavar="MODEL", help="the model to serve, as --model takes it (default: demo)"
    )
    add_options(parser, ServerOptions)
    add_engine_arguments(parser)


def run_serve(args: argparse.Namespace) -> None:
    """Serves until SIGTERM or Ctrl-C."""
    if missing := [name for name in _NEEDED if find_spec(name) is None]:
        raise ValueError(f'serve needs {", ".join(missing)}: pip install "dsa-engine[serve]"')
    options = ServerOptions(**options_from(args, ServerOptions))
    if options.api_key is None and (key := os.environ.get(KEY_VARIABLE)):
        options = replace(options, api_key=key)
    args.model = args.model_tag or args.model
    with _checked(args, options) if leads() else nullcontext() as bound:
        from dsa_engine.engine.stats_log import StatsLog
        from dsa_engine.server.process import serve

        llm = llm_from(args)
        if bound is None:
            if threading.current_thread() is threading.main_thread():
                for number in (signal.SIGTERM, signal.SIGINT):  # the launcher sends them here too; rank 0 ends the run
                    signal.signal(number, signal.SIG_IGN)
            llm.follow()
            return
        with llm, nullcontext() if options.disable_log_stats else StatsLog(llm.engine):
            status = serve(llm, options, bound).wait()
    if status:
        sys.exit(1)


def _checked(args: argparse.Namespace, options: ServerOptions) -> socket.socket:
    """Checks what can be wrong before the weights are loaded, which takes minutes; returns the socket, bound."""
    from dsa_engine.text.tokenizer import Tokenizer

    early = Early(args)
    read_template(options.chat_template)
    parsers = {"reasoning_parser": options.reasoning_parser, "tool_call_parser": options.tool_call_parser}
    if Tokenizer.lies_in(early.folder):
        early.conversation_format(**parsers)
    elif any(parsers.values()):
        raise ValueError(f"reasoning_parser and tool_call_parser need a tokenizer, and {early.folder} has none")
    return bind(options.host, options.port)
