"""Serving: ``scripts/bench_serve.py`` and ``dsa-engine bench serve``."""

from __future__ import annotations

import argparse
import math

from dsa_engine.arguments import llm_from, reported
from dsa_engine.commands.bench.serving_benchmark import ServingLoad, check_serving, measure_serving
from dsa_engine.commands.bench.serving_tables import print_serving, read_goals
from dsa_engine.commands.early import Early
from dsa_engine.measure.report import run_report, write_json
from dsa_engine.system.output_files import check_outputs


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
    try:
        if args.json:
            given = reported(args) | ({"request_rate": "inf"} if math.isinf(args.request_rate) else {})
            write_json(args.json, run_report(llm, given, llm.engine.mesh.world_size) | result.to_json())
    finally:  # the table is there even if the file cannot be written
        print_serving(result)
