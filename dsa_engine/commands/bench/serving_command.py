"""Serving: ``scripts/bench_serve.py`` and ``dsa-engine bench serve``."""

from __future__ import annotations

import argparse
import math

from dsa_engine.arguments import add_engine_arguments, add_json_argument, llm_from, reported
from dsa_engine.commands.bench.serving_benchmark import ServingLoad, check_serving, measure_serving
from dsa_engine.commands.bench.serving_tables import print_serving, read_goals
from dsa_engine.commands.early import Early
from dsa_engine.measure.report import run_report, write_json
from dsa_engine.system.output_files import check_outputs


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of :func:`run_serving`."""
    parser.add_argument("--num-prompts", type=int, default=100, help="requests in all")
    parser.add_argument("--request-rate", type=float, default=math.inf, help="arrivals a second; inf: all at once")
    parser.add_argument("--burstiness", type=float, default=1.0, help="1: Poisson; less: bursts; more: evenly")
    parser.add_argument("--max-concurrency", type=int, help="maximum number of requests at once; default: no limit")
    parser.add_argument("--random-input-len", type=int, default=1024, help="tokens of a prompt")
    parser.add_argument("--random-output-len", type=int, default=128, help="tokens of an output")
    parser.add_argument(
        "--random-range-ratio", type=float, default=0.0, help="lengths vary by this fraction, both ways"
    )
    parser.add_argument("--goodput", nargs="+", metavar="NAME:MS", help="such as ttft:2000 tpot:50 e2el:8000")
    parser.add_argument("--num-warmups", type=int, default=1, help="requests before, not counted")
    add_json_argument(parser)
    add_engine_arguments(parser)


def run_serving(args: argparse.Namespace) -> None:
    """Serves the requests and reports: the file first, then the table.

    Raises:
        ValueError, OSError: an option or a file is not possible; then nothing has been measured.
    """
    check_outputs(args.json)
    goals = read_goals(args.goodput or [])
    if args.num_warmups < 0:
        raise ValueError(f"--num-warmups must be at least 0, not {args.num_warmups}")
    load = ServingLoad(
        num_prompts=args.num_prompts,
        input_len=args.random_input_len,
        output_len=args.random_output_len,
        range_ratio=args.random_range_ratio,
        request_rate=args.request_rate,
        burstiness=args.burstiness,
        max_concurrency=args.max_concurrency,
        seed=args.seed,
    )
    Early(args).check_lengths(*(max(lengths) for lengths in zip(*load.lengths(), strict=True)))
    llm = llm_from(args)
    check_serving(llm.engine, load)
    result = measure_serving(llm.engine, load, goals, args.num_warmups)
    if not llm.engine.mesh.is_leader:
        return
    if args.json:
        given = reported(args) | ({"request_rate": "inf"} if math.isinf(args.request_rate) else {})
        write_json(args.json, run_report(llm, given, llm.engine.mesh.world_size) | result.to_json())
    print_serving(result)
