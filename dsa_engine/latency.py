"""What ``scripts/measure_ttft.py`` and ``scripts/measure_tpot.py`` share: they differ in the figure that they show."""

from __future__ import annotations

import argparse
from typing import Any

from dsa_engine.arguments import add_engine_arguments, check_outputs, lengths, llm_from
from dsa_engine.benchmark import measure_latency
from dsa_engine.memory import format_bytes
from dsa_engine.plots import plot_latency
from dsa_engine.report import environment, format_table, write_json


def measure_and_report(metric: str, description: str, output_len: int) -> None:
    """Parses the command line, measures every length and batch size, and reports ``metric`` ("ttft" or "tpot").

    Args:
        metric: which time the table and the plot show; the JSON holds both.
        description: of the script, for ``--help``.
        output_len: default number of output tokens.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--input-len", type=lengths, default=[8192, 32768, 131072], help="prompt lengths, in tokens")
    parser.add_argument("--batch-size", type=lengths, default=[1], help="requests at once, such as 1,8")
    parser.add_argument(
        "--output-len", type=int, default=output_len, help=f"tokens per request (default: {output_len})"
    )
    parser.add_argument("--warmup", type=int, default=1, help="runs that are not counted")
    parser.add_argument("--repeat", type=int, default=3, help="runs that are")
    parser.add_argument("--json", metavar="PATH", help="write the result here")
    parser.add_argument("--plot", metavar="PATH", help="draw the result here (.png)")
    add_engine_arguments(parser)
    args = parser.parse_args()
    fewest = 2 if metric == "tpot" else 1
    if args.output_len < fewest or args.repeat < 1 or args.warmup < 0:
        raise ValueError(
            f"--output-len must be at least {fewest}, --repeat at least 1 and --warmup at least 0, "
            f"not {args.output_len}, {args.repeat} and {args.warmup}"
        )
    check_outputs(args.json, plot=args.plot)
    if max(args.batch_size) > args.max_num_seqs:
        raise ValueError(
            f"--batch-size {max(args.batch_size)} exceeds --max-num-seqs {args.max_num_seqs}; raise --max-num-seqs"
        )
    llm = llm_from(args)
    engine = llm.engine
    for input_len in args.input_len:  # all of them, before any is measured
        engine.check([0] * input_len)
        engine.scheduler.check(input_len, args.output_len, max(args.batch_size))
    results: list[dict[str, Any]] = []
    for input_len in args.input_len:
        for batch_size in args.batch_size:
            measured = measure_latency(
                llm,
                input_len,
                args.output_len,
                batch_size=batch_size,
                warmup=args.warmup,
                repeat=args.repeat,
                seed=args.seed,
            )
            results.append(measured.to_json())
    if engine.mesh.rank != 0:
        return
    shares = ("median", "p90", "p99")
    rows = [
        (f"{r['input_len']:,}", r["batch_size"], r["output_len"])
        + tuple(r[f"{share}_{metric}_ms"] for share in shares)
        + (r.get("output_throughput", float("nan")), format_bytes(max(r["peak_memory_bytes"])))
        for r in results
    ]
    columns = tuple(f"{share} {metric.upper()} ms" for share in shares)
    print(format_table(("input", "batch", "output", *columns, "output tokens/s", "peak memory"), rows))
    if args.json:
        where = environment(engine.mesh.device, engine.dtype, engine.mesh.world_size)
        options = {key: value for key, value in vars(args).items() if value is not None}
        write_json(args.json, {**where, "options": options, "results": results})
    if args.plot:
        plot_latency(results, metric, args.plot)
