"""What long prompts cost the requests that decode: their TPOT and ITL alone, and while long prompts arrive.

[torchrun --nproc-per-node N] scripts/bench_long_prompts.py [--long-input-len 32768] [--request-rate 0.1]

Both passes run on the same engine with the same decoding requests, in turn. Long prompts arrive as a Poisson process
with a seed. Rank 0 sends all requests.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from dsa_engine.arguments import add_engine_arguments, add_json_argument, argument_parser, llm_from, reported, run
from dsa_engine.commands.bench.serving.datasets import RandomPrompts
from dsa_engine.commands.bench.serving.load import ServingLoad
from dsa_engine.commands.bench.serving.result import ServingResult
from dsa_engine.commands.bench.serving.side_by_side import measure_side_by_side
from dsa_engine.measure.plots import check_plot, load_pyplot, save
from dsa_engine.measure.report import caption, format_table, run_report, write_json
from dsa_engine.parallel.launch_environment import launched_rank
from dsa_engine.system.output_files import check_outputs

ALONE, BESIDE = "alone", "beside long prompts"
DECODING, LONG = "decoding", "long"

Passes = dict[str, dict[str, ServingResult]]  # by pass, the result of each load


def parse() -> argparse.Namespace:
    parser = argument_parser(__doc__)
    add_engine_arguments(parser)
    parser.add_argument("--num-prompts", type=int, default=8, help="requests that decode, all at once (default 8)")
    parser.add_argument("--input-len", type=int, default=256, help="their prompts' tokens (default 256)")
    parser.add_argument("--output-len", type=int, default=256, help="their outputs' tokens (default 256)")
    parser.add_argument("--num-long", type=int, default=4, help="long prompts, of one output token each (default 4)")
    parser.add_argument("--long-input-len", type=int, default=8192, help="their tokens (default 8192)")
    parser.add_argument("--request-rate", type=float, default=0.5, help="of long prompts per second (default 0.5)")
    add_json_argument(parser)
    parser.add_argument("--plot", metavar="FILE.png", help="ITL of the decoding requests in both passes")
    return parser.parse_args()


def main() -> None:
    args = parse()
    check_outputs(args.json, args.plot)
    check_plot(args.plot)
    decoding = ServingLoad(RandomPrompts(args.num_prompts, args.input_len, args.output_len), seed=args.seed)
    long = ServingLoad(
        RandomPrompts(args.num_long, args.long_input_len, 1), request_rate=args.request_rate, seed=args.seed
    )
    with llm_from(args) as llm:
        rank, ranks = launched_rank()
        if rank > 0:
            llm.follow()
            return
        passes = {
            ALONE: measure_side_by_side(llm, {DECODING: decoding}),
            BESIDE: measure_side_by_side(llm, {DECODING: decoding, LONG: long}),
        }
        about = run_report(llm, reported(args), ranks)
    results = {name: {load: one.to_json() for load, one in loads.items()} for name, loads in passes.items()}
    try:
        if args.json:
            write_json(args.json, about | {"results": results})
        if args.plot:
            plot(passes, args.plot, caption(about), results)
    finally:
        print(table(results))


def table(results: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> str:
    """A row for each load of each pass and each of its latencies."""
    rows = []
    for name, loads in results.items():
        for load, json in loads.items():
            for latency in ("ttft", "tpot", "itl"):
                if f"mean_{latency}_ms" in json:
                    times = [json[f"{part}_{latency}_ms"] for part in ("median", "p90", "p99", "max")]
                    rows.append((f"{load} requests, {name}", latency.upper(), *times, json["failed"]))
    return format_table(("", "", "median ms", "p90 ms", "p99 ms", "max ms", "failed"), rows)


def plot(passes: Passes, path: str, title: str, data: Mapping[str, Any]) -> None:
    """Draws the fraction of the decoding requests' tokens that came within a time, a curve for each pass."""
    figure, axes = load_pyplot().subplots(figsize=(7, 4.6), layout="constrained")
    axes.set_title(title, fontsize="medium")
    for name, loads in passes.items():
        ms = sorted(1e3 * s for request in loads[DECODING].done for s in request["itl"])
        axes.step(ms, [100 * (number + 1) / len(ms) for number in range(len(ms))], where="post", label=name)
    axes.set_xscale("log")
    axes.set_xlabel("ITL, ms")
    axes.set_ylabel("tokens, %")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    save(figure, path, data)


if __name__ == "__main__":
    run(main)
