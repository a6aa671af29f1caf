"""``dsa-engine bench prefill|ttft|tpot|serve``: the benchmarks of ``scripts/`` as an installed command."""

from __future__ import annotations

import argparse
from functools import partial

from dsa_engine.commands.bench import latency_command, prefill_command, serving_command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(required=True, metavar="WHAT")
    prefill = kinds.add_parser("prefill", help="a long prompt alone: time, tokens/s, memory and stages of each rank")
    prefill_command.add_arguments(prefill)
    prefill.set_defaults(command=prefill_command.run_prefill)
    for metric, name in (("ttft", "time to first token"), ("tpot", "time per output token")):
        latency = kinds.add_parser(metric, help=f"{name}, through the generate API")
        latency_command.add_arguments(latency, metric)
        latency.set_defaults(command=partial(latency_command.run_latency, metric=metric))
    serve = kinds.add_parser("serve", help="requests that arrive over time: throughput, latencies and goodput")
    serving_command.add_arguments(serve)
    serve.set_defaults(command=serving_command.run_serving)
