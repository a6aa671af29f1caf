"""Long-context prefill benchmark: torchrun --nproc-per-node N scripts/bench_prefill.py --seq-len 8192,32768"""

from __future__ import annotations

import argparse

import numpy as np
import torch

from dsa_engine.arguments import add_engine_arguments, check_outputs, lengths, llm_from, read_text, run
from dsa_engine.benchmark import PrefillResult, from_all_ranks, measure_prefill, random_prompt
from dsa_engine.llm import LLM
from dsa_engine.memory import format_bytes
from dsa_engine.plots import plot_prefill
from dsa_engine.report import environment, format_table, write_json


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    prompt = parser.add_mutually_exclusive_group()
    prompt.add_argument("--seq-len", type=lengths, default=[8192], help="lengths of random prompts, such as 8192,32768")
    prompt.add_argument("--prompt-file", metavar="PATH", help="prefill this text instead")
    parser.add_argument("--warmup", type=int, default=1, help="runs that are not counted")
    parser.add_argument("--repeat", type=int, default=3, help="runs that are")
    parser.add_argument("--json", metavar="PATH", help="write the result here")
    parser.add_argument("--dump-logits", metavar="PATH", help="write the last position's logits (.npy) here")
    parser.add_argument("--plot", metavar="PATH", help="draw TTFT and stages here (.png)")
    parser.add_argument("--profile", metavar="PATH", help="write a Chrome trace of one more run on rank 0 here")
    add_engine_arguments(parser)
    return parser.parse_args()


def main() -> None:
    args = parse()
    if args.repeat < 1 or args.warmup < 0:
        raise ValueError(f"--repeat must be at least 1 and --warmup at least 0, not {args.repeat} and {args.warmup}")
    check_outputs(args.json, args.dump_logits, args.profile, plot=args.plot)
    text = read_text(args.prompt_file) if args.prompt_file else None
    llm = llm_from(args)
    engine = llm.engine
    prompts = (
        [llm.tokenizer.encode(text)]
        if text is not None
        else [random_prompt(engine, n, args.seed) for n in args.seq_len]
    )
    for prompt in prompts:
        engine.check(prompt)  # all of them, before any is measured
    first = engine.mesh.rank == 0
    load = from_all_ranks(engine, [engine.load_seconds, float(engine.bytes_read)])
    results = []
    for prompt in prompts:
        results.append(measure_prefill(engine, prompt, warmup=args.warmup, repeat=args.repeat))
        if first:
            report(results[-1])
    if args.profile:
        profile(llm, prompts[-1], args.profile)
    if not first:
        return
    if args.json:
        where = environment(engine.mesh.device, engine.dtype, engine.mesh.world_size)
        options = {key: value for key, value in vars(args).items() if value is not None}
        loaded = {"load_seconds": [rank[0] for rank in load], "weight_bytes_read": [int(rank[1]) for rank in load]}
        write_json(args.json, {**where, "options": options, **loaded, "results": [r.to_json() for r in results]})
    if args.dump_logits:
        with open(args.dump_logits, "wb") as file:
            np.save(file, results[-1].logits.numpy())
    if args.plot:
        plot_prefill([r.to_json() for r in results], args.plot)


def report(result: PrefillResult) -> None:
    """Prints one length: the figures, the ranks, the stages."""
    j = result.to_json()
    print(
        f"\n{result.input_len} tokens: TTFT {j['median_ttft_ms']:.0f} ms (min {j['min_ttft_ms']:.0f}, max "
        f"{j['max_ttft_ms']:.0f}, {len(result.seconds)} runs), {j['input_throughput']:.0f} tokens/s, "
        f"attention imbalance {result.imbalance:.4f} (max/mean)\n"
    )
    ranks = zip(result.peak_memory_bytes, result.attention_pairs, result.bytes_sent, strict=True)
    rows = [(i, format_bytes(peak), f"{pairs:,}", format_bytes(sent)) for i, (peak, pairs, sent) in enumerate(ranks)]
    print(format_table(("rank", "peak memory", "attention pairs", "sent"), rows))
    count = len(result.stage_seconds)
    rows = []
    total = sum(sum(rank.values()) for rank in result.stage_seconds) / count
    for name in result.stage_seconds[0]:
        times = [rank[name] * 1e3 for rank in result.stage_seconds]
        if any(times):
            rows.append((name, sum(times) / count, max(times), f"{sum(times) / count / total / 10:.1f}%"))
    print("\n" + format_table(("stage", "mean ms", "slowest rank", "share"), rows))


def profile(llm: LLM, prompt: list[int], path: str) -> None:
    """One run under PyTorch's profiler, on rank 0; the others run along."""
    engine = llm.engine
    if engine.mesh.rank != 0:
        engine.prefill(prompt)
        return
    with torch.profiler.profile() as profiler:
        engine.prefill(prompt)
    profiler.export_chrome_trace(path)


if __name__ == "__main__":
    run(main)
