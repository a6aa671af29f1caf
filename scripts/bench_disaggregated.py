"""Prefill apart from decode, beside one engine: TTFT, and TPOT and ITL of requests that decode while long prompts come.

torchrun --nproc-per-node 2 scripts/bench_disaggregated.py --prefill-ranks 1 [--long-input-len 32768] [--plot x.png]

All passes have the same ranks and the same requests: one engine with the decoding requests alone, then beside long
prompts, then with --prefill-ranks in two parts. Long prompts arrive as a Poisson process with a seed; rank 0 sends all
requests. Without --prefill-ranks the last pass is left out.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from typing import Any

import torch

from dsa_engine.arguments import add_engine_arguments, add_json_argument, argument_parser, llm_from, reported, run
from dsa_engine.commands.bench.serving.datasets import RandomPrompts
from dsa_engine.commands.bench.serving.load import ServingLoad
from dsa_engine.commands.bench.serving.result import ServingResult
from dsa_engine.commands.bench.serving.side_by_side import measure_side_by_side
from dsa_engine.engine.requests.capacity import pages_for
from dsa_engine.llm import LLM
from dsa_engine.measure.across_ranks import from_all_ranks
from dsa_engine.measure.plots import check_plot, load_pyplot, save
from dsa_engine.measure.report import caption, format_table, run_report, write_json
from dsa_engine.parallel.launch_environment import launched_rank
from dsa_engine.system.output_files import check_outputs
from dsa_engine.system.sizes import format_bytes

ALONE, BESIDE, APART = "one engine, alone", "one engine", "apart"
DECODING, LONG = "decoding", "long"
WARMUP = 1  # requests of each load before those that count
PROBE, PROBES = 16 << 20, 5  # bytes that are sent to measure the link, and how often

Pass = dict[str, ServingResult]  # the result of each load


def parse() -> argparse.Namespace:
    parser = argument_parser(__doc__)
    add_engine_arguments(parser)
    parser.add_argument("--num-prompts", type=int, default=8, help="requests that decode, all at once (default 8)")
    parser.add_argument("--input-len", type=int, default=256, help="their prompts' tokens (default 256)")
    parser.add_argument("--output-len", type=int, default=256, help="their outputs' tokens (default 256)")
    parser.add_argument("--num-long", type=int, default=4, help="long prompts (default 4)")
    parser.add_argument("--long-input-len", type=int, default=8192, help="their tokens (default 8192)")
    parser.add_argument("--long-output-len", type=int, default=8, help="their outputs' tokens (default 8)")
    parser.add_argument("--request-rate", type=float, default=0.5, help="of long prompts per second (default 0.5)")
    add_json_argument(parser)
    parser.add_argument("--plot", metavar="FILE.png", help="ITL of the decoding requests in each pass")
    return parser.parse_args()


def main() -> None:
    args = parse()
    check_outputs(args.json, args.plot)
    check_plot(args.plot)
    lengths = args.long_input_len, args.long_output_len
    loads = {
        DECODING: ServingLoad(RandomPrompts(args.num_prompts, args.input_len, args.output_len), seed=args.seed),
        LONG: ServingLoad(RandomPrompts(args.num_long, *lengths), request_rate=args.request_rate, seed=args.seed),
    }
    rank, ranks = launched_rank()
    passes: dict[str, Pass] = {}
    transfer: dict[str, Any] | None = None
    in_one = argparse.Namespace(**vars(args) | {"prefill_ranks": None, "decode_options": "{}"})
    with llm_from(in_one) as llm:
        if rank > 0:
            llm.follow()
        else:
            passes[ALONE] = measure_side_by_side(llm, {DECODING: loads[DECODING]}, WARMUP)
            passes[BESIDE] = measure_side_by_side(llm, loads, WARMUP)
            about = run_report(llm, reported(args), ranks)
    if args.prefill_ranks is not None:
        with llm_from(args) as llm:
            if rank > 0:
                llm.follow()
            else:
                passes[APART] = measure_side_by_side(llm, loads, WARMUP)
        rate = link_rate(llm)
        if rank < args.prefill_ranks:
            transfer = sent(llm, loads) | {"prefill_ranks": args.prefill_ranks, "link_bytes_per_s": rate}
    if rank > 0:
        return
    results = {name: {load: one.to_json() for load, one in each.items()} for name, each in passes.items()}
    try:
        if args.json:
            write_json(args.json, about | {"results": results, "transfer": transfer})
        if args.plot:
            plot(passes, args.plot, caption(about), results)
    finally:
        print(table(results))
        if transfer:
            print(f"\n{transfer_line(transfer)}")


def sent(llm: LLM, loads: Mapping[str, ServingLoad]) -> dict[str, Any]:
    """The transfer of all ranks that prefill, beside the bytes of the pages of all prompts; each of them calls it when
    the engine is closed."""
    engine = llm.engine
    sender = engine.side.sender if engine.side else None
    assert sender is not None
    mine = [float(sender.bytes_sent), float(sender.bytes_hidden), sender.exposed_s]
    total = [sum(values) for values in zip(*from_all_ranks(engine, mine), strict=True)]
    prompts = {}
    for name, load in loads.items():
        lengths = [one for (one,) in load.lengths()]
        goes = lengths[0][1] > 1  # a request of one token ends where it is prefilled
        prompts[name] = {"input_len": lengths[0][0], "requests": (len(lengths) + WARMUP) * goes}
    pages = sum(one["requests"] * pages_for(one["input_len"], engine.cache.page_size) for one in prompts.values())
    return {
        "prompts": prompts,
        "pages": pages,
        "page_bytes": engine.cache.page_bytes,
        "bytes_of_pages": pages * engine.cache.page_bytes,
        "bytes_sent": int(total[0]),
        "hidden": total[1] / total[0] if total[0] else None,
        "exposed_ms": total[2] * 1e3,
    }


def link_rate(llm: LLM) -> float:
    """Bytes per second from the first rank that prefills to the first that decodes, with nothing else under way; all
    ranks call it when the engine is closed."""
    engine = llm.engine
    assert engine.side is not None
    first, mesh, seconds = engine.side.first_rank, engine.mesh, []
    if mesh.run_rank != first:
        return 0.0
    rows = torch.ones(PROBE, dtype=torch.uint8, device=mesh.device)
    link = engine.side.links[min(engine.side.links)]
    for _ in range(PROBES):
        begun = time.perf_counter()
        (link.send if first == 0 else link.recv)(rows, 1 - link.index)
        rows[-1].item()  # it has come
        seconds.append(time.perf_counter() - begun)
    return PROBE / min(seconds)


def transfer_line(transfer: Mapping[str, Any]) -> str:
    part = "" if transfer["hidden"] is None else f", {transfer['hidden']:.1%} of them under the prefill"
    due = f"the prompts' {transfer['pages']:,} pages have {format_bytes(transfer['bytes_of_pages'])}"
    after = f"{transfer['exposed_ms']:.3g} ms after it in all"
    return f"Sent: {format_bytes(transfer['bytes_sent'])} ({due}){part}; {after}"


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


def plot(passes: Mapping[str, Pass], path: str, title: str, data: Mapping[str, Any]) -> None:
    """Draws the fraction of the decoding requests' tokens that came within a time, a curve for each pass."""
    figure, axes = load_pyplot().subplots(figsize=(7, 4.6), layout="constrained")
    axes.set_title(title, fontsize="medium")
    for name, loads in passes.items():
        ms = sorted(1e3 * s for request in loads[DECODING].done for s in request["itl"])
        axes.step(ms, [100 * (number + 1) / len(ms) for number in range(len(ms))], where="post", label=name)
    axes.set_xscale("log")
    axes.set_xlabel("ITL of decoding requests, ms")
    axes.set_ylabel("tokens, %")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    save(figure, path, data)


if __name__ == "__main__":
    run(main)
