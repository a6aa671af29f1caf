"""Serving, at a server with the OpenAI API: ``dsa-engine bench serve``."""

from __future__ import annotations

import argparse
import asyncio
import math

from dsa_engine.commands.arguments import add_json_argument, reported
from dsa_engine.commands.bench.serving.load import add_load_arguments, at_least_1
from dsa_engine.commands.bench.serving.result import print_serving, read_goals, summary
from dsa_engine.measure.report import versions, write_json
from dsa_engine.system.output_files import check_outputs


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options, which are those of ``vllm bench serve``, and of conversations those of SGLang."""
    parser.add_argument("--base-url", metavar="URL", default="http://127.0.0.1:8000", help="OPENAI_API_KEY is sent")
    parser.add_argument(
        "--backend",
        choices=("openai", "openai-chat"),
        default="openai",
        help="openai: completions (default); openai-chat: chats",
    )
    parser.add_argument("--endpoint", metavar="PATH", help="default: /v1/completions or /v1/chat/completions")
    parser.add_argument("--model", metavar="NAME", help="the server's name of it; default: the first that it lists")
    parser.add_argument("--max-concurrency", type=at_least_1, help="maximum number of requests at once; default: none")
    parser.add_argument("--goodput", nargs="+", metavar="NAME:MS", help="such as ttft:2000 tpot:50 e2el:8000")
    parser.add_argument("--num-warmups", type=int, default=1, help="requests before, not counted")
    parser.add_argument(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="outputs of full length (default); a server that refuses the parameter ignore_eos needs --no-ignore-eos",
    )
    parser.add_argument(
        "--prefix-hits",
        choices=("on", "off"),
        default="on",
        help="off: each request has a cache_salt of its own, and finds nothing in the server's prefix cache",
    )
    parser.add_argument("--no-progress", action="store_true", help="show no progress bar")
    add_json_argument(parser)
    add_load_arguments(parser)


def run_serving(args: argparse.Namespace) -> None:
    """Sends the requests and reports: the file first, then the tables.

    Raises:
        ValueError, OSError: an option or a file is not possible, or the server refuses; nothing has been measured.
    """
    check_outputs(args.json)
    goals = read_goals(args.goodput or [])
    try:
        from dsa_engine.commands.bench.serving.traffic import send_load
    except ModuleNotFoundError as error:
        raise ValueError(f'this needs {error.name}; install it with: pip install "dsa-engine[serve]"') from error
    traffic, server = asyncio.run(send_load(args))
    result = summary(traffic.requests, traffic.duration, traffic.max_at_once, goals)
    rate = {"request_rate": "inf"} if math.isinf(args.request_rate) else {}
    try:
        if args.json:
            write_json(args.json, versions("httpx") | {"server": server, "options": reported(args) | rate} | result)
    finally:  # the tables are there even if the file cannot be written
        print_serving(result, args.request_rate)
