"""What ``scripts/measure_ttft.py`` and ``scripts/measure_tpot.py`` do alike; each shows another latency."""

from __future__ import annotations

import argparse

from dsa_engine.arguments import add_engine_arguments, argument_parser, check_outputs, lengths, reported
from dsa_engine.engine.engine import Engine
from dsa_engine.llm import LLM
from dsa_engine.measure.across_ranks import num_processes
from dsa_engine.measure.emulation.arguments import add_emulation_arguments, heading, measured_llm, title, to_json
from dsa_engine.measure.emulation.links import Links
from dsa_engine.measure.full_depth import FullDepth
from dsa_engine.measure.generation_benchmark import LatencyResult, check_latency, measure_latency
from dsa_engine.measure.generation_tables import print_latencies, size_of
from dsa_engine.measure.plots import check_plot, plot_latency
from dsa_engine.measure.random_prompt import random_prompt
from dsa_engine.measure.report import caption, run_report, write_json
from dsa_engine.measure.stage_timer import chrome_trace, mean_stages
from dsa_engine.measure.timed_generation import generate_batch


def measure_and_report(metric: str, description: str, output_len: int) -> None:
    """Parses the command line, measures every length and batch size, and reports ``metric`` ("ttft" or "tpot").

    Args:
        metric: which time the table and the plot show; the JSON holds both.
        description: of the script, for ``--help``.
        output_len: default number of output tokens.
    """
    args = _parse(metric, description, output_len)
    check_outputs(args.json, args.profile, args.plot)
    check_plot(args.plot)
    llm, links = measured_llm(args)
    engine = llm.engine
    for input_len in args.input_len:  # all of them, before any is measured
        for batch_size in args.batch_size:
            check_latency(engine, input_len, args.output_len, batch_size, _fills_cache(args))
    depth = FullDepth.of(llm)
    results = [
        _measure(llm, args, metric, input_len, batch_size, links)
        for input_len in args.input_len
        for batch_size in args.batch_size
    ]
    if args.profile:
        _profile(engine, args)
    if not engine.mesh.reports:
        return
    scaled = [_scaled(r, depth) for r in results] if depth else [{} for _ in results]
    print_latencies(metric, results, heading(engine, links))
    for result, times in zip(results, scaled, strict=True):
        if depth:
            print(depth.line(size_of(result), metric, times))
    listed = [r.to_json() | (depth.to_json(times) if depth else {}) for r, times in zip(results, scaled, strict=True)]
    about = run_report(llm, reported(args), num_processes(engine))
    if args.json:
        graphs = {"cuda_graph_memory_bytes": engine.graphs.memory_bytes if engine.graphs else 0}
        write_json(args.json, {**about, **graphs, **to_json(engine, links), "results": listed})
    if args.plot:
        plot_latency(listed, metric, args.plot, caption(about, title(engine)))


def _parse(metric: str, description: str, output_len: int) -> argparse.Namespace:
    parser = argument_parser(description)
    parser.add_argument("--input-len", type=lengths, default=[8192, 32768, 131072], help="prompt lengths, in tokens")
    parser.add_argument(
        "--batch-size", type=lengths, default=[1], help="requests at once, of all ranks together, such as 1,8"
    )
    parser.add_argument(
        "--output-len", type=int, default=output_len, help=f"tokens per request (default: {output_len})"
    )
    parser.add_argument("--warmup", type=int, default=1, help="runs that are not counted")
    parser.add_argument("--repeat", type=int, default=3, help="runs that are")
    parser.add_argument("--json", metavar="PATH", help="write the result here")
    parser.add_argument("--plot", metavar="PATH", help="draw the result here (.png)")
    parser.add_argument("--profile", metavar="PATH", help="write a Chrome trace of one more run on rank 0 here")
    if metric == "tpot":
        parser.add_argument(
            "--fill-cache",
            choices=("random",),
            help="fill the caches with random rows instead of computing the prompts",
        )
    add_engine_arguments(parser)
    add_emulation_arguments(parser)
    args = parser.parse_args()
    fewest = 2 if metric == "tpot" else 1
    if args.output_len < fewest or args.repeat < 1 or args.warmup < 0:
        raise ValueError(
            f"--output-len must be at least {fewest}, --repeat at least 1 and --warmup at least 0, "
            f"not {args.output_len}, {args.repeat} and {args.warmup}"
        )
    return args


def _measure(
    llm: LLM, args: argparse.Namespace, metric: str, input_len: int, batch_size: int, links: Links
) -> LatencyResult:
    return measure_latency(
        llm,
        input_len,
        args.output_len,
        batch_size=batch_size,
        warmup=args.warmup,
        repeat=args.repeat,
        seed=args.seed,
        links=links,
        fill_cache=_fills_cache(args),
    )


def _profile(engine: Engine, args: argparse.Namespace) -> None:
    """One more run of the last length and batch size; the other ranks run along."""
    input_len, batch_size = args.input_len[-1], args.batch_size[-1]
    prompts = [random_prompt(engine, input_len, args.seed + i) for i in range(batch_size)]
    with chrome_trace(args.profile if engine.mesh.reports else None):
        generate_batch(engine, prompts, args.output_len, fill_cache=_fills_cache(args))


def _fills_cache(args: argparse.Namespace) -> bool:
    return getattr(args, "fill_cache", None) is not None


def _scaled(result: LatencyResult, depth: FullDepth) -> dict[str, float]:
    """Milliseconds of TTFT and TPOT at full depth."""
    scaled = depth.scale(result.ttft, mean_stages(result.prefill_stages)) if result.ttft else {}
    if result.tpot:
        scaled |= depth.scale(result.tpot, mean_stages(result.decode_stages))
    return scaled
