"""Routing rules compared on a model of several replicas: hit rate, TTFT and balance. Nothing here is measured.

scripts/studies/simulate_routing.py [--replicas 4] [--request-rate 1,2,3] [--duration 1200] [--json PATH]

Seeded conversations, some about shared documents, and single prompts of 100 to 128K tokens arrive as a Poisson process.
The same traffic goes through round robin, least requests and the router's rule (dsa_engine/router/rule.py).
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

import torch

from dsa_engine.arguments import add_json_argument, argument_parser, run
from dsa_engine.measure.report import environment, format_table, write_json
from dsa_engine.system.output_files import check_outputs
from routing_simulation.replicas import ReplicaModel
from routing_simulation.routers import ROUTERS
from routing_simulation.simulation import SHORT_TOKENS, Summary, simulate
from routing_simulation.traffic import Traffic


def parse() -> argparse.Namespace:
    parser = argument_parser(__doc__)
    parser.add_argument("--replicas", type=int, default=4, help="number of replicas")
    parser.add_argument("--request-rate", default="1,2,3", metavar="RATES", help="conversations that begin a second")
    parser.add_argument("--duration", type=float, default=1200.0, help="seconds in which conversations begin")
    parser.add_argument("--documents", type=int, default=Traffic.documents, help="documents that are asked about")
    parser.add_argument(
        "--about-document", type=float, default=Traffic.about_document, help="fraction of conversations about one"
    )
    parser.add_argument("--cache-tokens", type=int, default=ReplicaModel.cached_tokens, help="of each prefix cache")
    parser.add_argument("--prefill-rate", type=float, default=ReplicaModel.prefill_tokens_per_s, help="tokens a second")
    parser.add_argument("--seed", type=int, default=0, help="of the traffic")
    add_json_argument(parser)
    args = parser.parse_args()
    try:
        args.request_rate = [float(rate) for rate in args.request_rate.split(",")]
    except ValueError:
        raise ValueError(f"--request-rate must be numbers such as 1,2.5, not {args.request_rate!r}") from None
    for name in ("replicas", "duration", "documents", "cache_tokens", "prefill_rate"):
        if not getattr(args, name) > 0:
            raise ValueError(f"--{name.replace('_', '-')} must be positive, not {getattr(args, name)}")
    if not 0 <= args.about_document <= 1 or min(args.request_rate) <= 0:
        raise ValueError("--about-document must be from 0 to 1, and each rate of --request-rate positive")
    return args


def main() -> None:
    args = parse()
    check_outputs(args.json)
    model = ReplicaModel(prefill_tokens_per_s=args.prefill_rate, cached_tokens=args.cache_tokens)
    results: list[dict[str, Any]] = []
    for rate in args.request_rate:
        traffic = Traffic(
            rate=rate,
            duration_s=args.duration,
            seed=args.seed,
            documents=args.documents,
            about_document=args.about_document,
        )
        conversations = traffic.conversations()
        summaries = {
            name: simulate(conversations, make(args.replicas, model.cached_tokens), args.replicas, model)
            for name, make in ROUTERS.items()
        }
        print(_table(rate, summaries), end="\n\n", flush=True)
        results += [{"rate": rate, "rule": name} | summary.to_json() for name, summary in summaries.items()]
    if args.json:
        where = environment(torch.device("cpu"), torch.float32, 1)
        about = {name: where[name] for name in ("date", "commit", "versions")}
        about |= {
            "modelled": True,
            "options": vars(args),
            "replica": asdict(model),
            "traffic": asdict(traffic) | {"rate": args.request_rate},
        }
        write_json(args.json, about | {"results": results})


def _table(rate: float, summaries: dict[str, Summary]) -> str:
    requests = max(summary.requests for summary in summaries.values())
    short = f"under {SHORT_TOKENS}"
    header = (
        f"{rate:g} conversations/s, {requests} requests",
        "hit rate",
        f"TTFT s, {short}: p50",
        "p99",
        "longer: p50",
        "p99",
        "busiest/mean",
        "busy",
    )
    rows = [
        (
            name,
            f"{one.hit_rate:.1%}",
            *(f"{seconds:.2f}" for seconds in (*one.ttft_short, *one.ttft_long)),
            f"{one.imbalance:.2f}",
            f"{one.busy:.0%}",
        )
        for name, one in summaries.items()
    ]
    return format_table(header, rows)


if __name__ == "__main__":
    run(main)
