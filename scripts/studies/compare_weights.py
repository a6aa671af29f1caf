"""Decode of one model stored in several ways, in one process, in turn: time per output token, ratio to the first.

Example:
    python scripts/studies/compare_weights.py PLAIN INT8 INT4 --input-len 512 --dtype float32
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

from dsa_engine import LLM
from dsa_engine.arguments import add_json_argument, argument_parser, run
from dsa_engine.commands.bench.generation_benchmark import check_latency, measure_latency
from dsa_engine.measure.report import format_table, model_name, run_report, write_json
from dsa_engine.system.output_files import check_outputs
from dsa_engine.system.sizes import format_bytes


def parse() -> argparse.Namespace:
    parser = argument_parser(__doc__)
    parser.add_argument("models", nargs="+", metavar="MODEL", help="folders; the others are compared with the first")
    parser.add_argument("--input-len", type=int, default=512, help="tokens in the caches, which are filled at random")
    parser.add_argument("--output-len", type=int, default=32, help="tokens of a run")
    parser.add_argument("--batch-size", type=int, default=1, help="requests at once")
    parser.add_argument("--repeat", type=int, default=5, help="runs of each, in turn, after one that is not counted")
    parser.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    add_json_argument(parser)
    args = parser.parse_args()
    if args.output_len < 2 or min(args.repeat, args.batch_size, args.input_len) < 1:
        raise ValueError("--output-len must be at least 2, --repeat, --batch-size and --input-len at least 1")
    return args


def main() -> None:
    args = parse()
    check_outputs(args.json)
    options: dict[str, Any] = {
        "dtype": args.dtype,
        "device": args.device,
        "max_num_seqs": args.batch_size,
        "max_model_len": args.input_len + args.output_len + 1,
    }
    llms = [LLM(model, progress=False, **options) for model in args.models]
    for llm in llms:
        check_latency(llm.engine, args.input_len, args.output_len, args.batch_size, fill_cache=True)
    times: list[list[float]] = [[] for _ in llms]
    for _ in range(args.repeat):
        for llm, taken in zip(llms, times, strict=True):
            measured = measure_latency(
                llm, args.input_len, args.output_len, batch_size=args.batch_size, repeat=1, fill_cache=True
            )
            taken.append(measured.to_json()["median_tpot_ms"])
    results: list[dict[str, Any]] = []
    for llm, taken in zip(llms, times, strict=True):
        median = statistics.median(taken)
        results.append(
            {
                "model": model_name(llm),
                "weight_bytes": sum(tensor.nbytes for tensor in llm.engine.model.parameters()),
                "tpot_ms": taken,
                "median_tpot_ms": median,
                "times_as_fast_as_the_first": statistics.median(times[0]) / median,
            }
        )
    if args.json:
        given = {name: value for name, value in vars(args).items() if name not in ("json", "models")}
        write_json(args.json, run_report(llms[0], given, 1) | {"results": results})
    rows = [
        (
            r["model"],
            format_bytes(r["weight_bytes"]),
            f"{r['median_tpot_ms']:.2f}",
            f"{r['times_as_fast_as_the_first']:.2f}x",
        )
        for r in results
    ]
    print(format_table(("weights", "bytes", "TPOT ms", "times as fast as the first"), rows))


if __name__ == "__main__":
    run(main)
