"""What CUDA graphs and each overlap gain in decode: time per output token with all of them, and without one at a time.

One process, in which the model is made anew for each; caches are filled with random rows. On a CPU there is nothing to
turn off, and all rows are the same work.
"""

from __future__ import annotations

import argparse
import copy
import gc
from typing import Any

import torch

from dsa_engine.arguments import add_engine_arguments, argument_parser, lengths, reported, run
from dsa_engine.measure.across_ranks import num_processes
from dsa_engine.measure.emulation.arguments import add_emulation_arguments, heading, measured_llm, to_json
from dsa_engine.measure.generation_benchmark import check_latency, measure_latency
from dsa_engine.measure.report import format_table, run_report, write_json
from dsa_engine.output_files import check_outputs

# What is turned off, and the options that do it.
VARIANTS = {
    "nothing": (),
    "CUDA graphs": ("enforce_eager",),
    "async scheduling": ("no_async_scheduling",),
    "overlap of the shared expert": ("no_overlap_shared_expert",),
    "overlap of the indexer": ("no_overlap_indexer",),
    "all of them": ("enforce_eager", "no_async_scheduling", "no_overlap_shared_expert", "no_overlap_indexer"),
}


def parse() -> argparse.Namespace:
    parser = argument_parser(__doc__)
    parser.add_argument("--input-len", type=lengths, default=[8192, 32768, 131072], help="context lengths, in tokens")
    parser.add_argument("--batch-size", type=int, default=1, help="requests at once, of all ranks together")
    parser.add_argument("--output-len", type=int, default=64, help="tokens per request")
    parser.add_argument("--repeat", type=int, default=3, help="runs of each, after one that is not counted")
    parser.add_argument("--json", metavar="PATH", help="write the result here; '-': to standard output")
    add_engine_arguments(parser)
    add_emulation_arguments(parser)
    args = parser.parse_args()
    if args.output_len < 2 or min(args.repeat, args.batch_size) < 1:
        raise ValueError("--output-len must be at least 2, --repeat and --batch-size at least 1")
    return args


def main() -> None:
    args = parse()
    check_outputs(args.json)
    results: list[dict[str, Any]] = []
    for name, options in VARIANTS.items():
        chosen = copy.copy(args)
        for option in options:
            setattr(chosen, option, True)
        llm, links = measured_llm(chosen)
        engine, mesh = llm.engine, llm.engine.mesh
        above = heading(engine, links)
        about = run_report(llm, reported(args), num_processes(engine)) | to_json(engine, links)
        for input_len in args.input_len:  # all of them, before any is measured
            check_latency(engine, input_len, args.output_len, args.batch_size, fill_cache=True)
        for input_len in args.input_len:
            measured = measure_latency(
                llm,
                input_len,
                args.output_len,
                batch_size=args.batch_size,
                repeat=args.repeat,
                seed=args.seed,
                links=links,
                fill_cache=True,
            )
            graphs = engine.graphs.memory_bytes if engine.graphs else 0
            results.append({"turned_off": name, "graph_memory_bytes": graphs, **measured.to_json()})
        if engine.graphs:
            engine.graphs.close()
        del llm, engine
        gc.collect()
        torch.cuda.empty_cache()  # the next engine looks at what is free; none is running
    if not mesh.reports:
        return
    if args.json:
        write_json(args.json, {**about, "results": results})
    if above:
        print(above + "\n")
    figure = "computed TPOT" if above else "TPOT"
    print(
        format_table(("turned off", *(f"{figure} ms at {n:,}" for n in args.input_len)), table(results, args.input_len))
    )
    if mesh.device.type != "cuda":
        print("\nOn a CPU there is nothing to turn off: all rows are the same work, and their ratios are noise.")


def table(results: list[dict[str, Any]], input_lens: list[int]) -> list[tuple[str, ...]]:
    """A row for each variant: the median time, and its ratio to that with everything on."""
    times: dict[str, list[float]] = {name: [] for name in VARIANTS}
    for result in results:
        times[result["turned_off"]].append(result.get("median_tpot_ms") or result["median_computed_tpot_ms"])
    base = times["nothing"]
    return [
        (name, *(f"{ms:.2f} ({ms / base[i]:.2f}x)" for i, ms in enumerate(times[name][: len(input_lens)])))
        for name in VARIANTS
    ]


if __name__ == "__main__":
    run(main)
