"""Long-context prefill benchmark: torchrun --nproc-per-node N scripts/bench_prefill.py --seq-len 8192,32768

One rank of many on one device: python scripts/bench_prefill.py --emulate-world 64 --load-format dummy --model FOLDER
"""

from __future__ import annotations

import argparse

import numpy as np

from dsa_engine.arguments import add_engine_arguments, argument_parser, check_outputs, lengths, read_text, reported, run
from dsa_engine.measure.across_ranks import from_all_ranks, num_processes
from dsa_engine.measure.emulation.arguments import add_emulation_arguments, heading, measured_llm, title, to_json
from dsa_engine.measure.emulation.mesh import EmulatedMesh
from dsa_engine.measure.full_depth import FullDepth
from dsa_engine.measure.plots import check_plot, plot_prefill
from dsa_engine.measure.prefill_benchmark import measure_prefill
from dsa_engine.measure.prefill_tables import print_prefill
from dsa_engine.measure.random_prompt import random_prompt
from dsa_engine.measure.report import caption, run_report, write_json
from dsa_engine.measure.stage_timer import chrome_trace, mean_stages


def parse() -> argparse.Namespace:
    parser = argument_parser(__doc__)
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
    add_emulation_arguments(parser)
    return parser.parse_args()


def main() -> None:
    args = parse()
    if args.repeat < 1 or args.warmup < 0:
        raise ValueError(f"--repeat must be at least 1 and --warmup at least 0, not {args.repeat} and {args.warmup}")
    check_outputs(args.json, args.dump_logits, args.profile, args.plot)
    check_plot(args.plot)
    text = read_text(args.prompt_file) if args.prompt_file else None
    llm, links = measured_llm(args)
    engine = llm.engine
    if isinstance(engine.mesh, EmulatedMesh) and args.dump_logits:
        raise ValueError(
            "--dump-logits with --emulate-world: the logits of an emulated rank mean nothing; leave it out"
        )
    prompts = (
        [llm.tokenizer.encode(text)]
        if text is not None
        else [random_prompt(engine, n, args.seed) for n in args.seq_len]
    )
    for prompt in prompts:
        engine.check(prompt)  # all of them, before any is measured
    depth = FullDepth.of(llm)
    first = engine.mesh.reports
    load = from_all_ranks(engine, [engine.load_seconds, float(engine.bytes_read)])
    if first and isinstance(engine.mesh, EmulatedMesh):
        print(heading(engine, links))
    results, listed = [], []
    for prompt in prompts:
        result = measure_prefill(engine, prompt, warmup=args.warmup, repeat=args.repeat, links=links)
        results.append(result)
        listed.append(result.to_json())
        if first:
            print_prefill(result, engine.mesh.rank)
        if depth:
            scaled = depth.scale(result.ttft, mean_stages(result.stage_seconds))
            listed[-1] |= depth.to_json(scaled)
            if first:
                print("\n" + depth.line(f"{result.input_len:,} tokens", "ttft", scaled))
    if args.profile:
        with chrome_trace(args.profile if first else None):  # the other ranks run along
            engine.prefill(prompts[-1])
    if not first:
        return
    about = run_report(llm, reported(args), num_processes(engine))
    if args.json:
        loaded = {"load_seconds": [rank[0] for rank in load], "weight_bytes_read": [int(rank[1]) for rank in load]}
        write_json(args.json, {**about, **to_json(engine, links), **loaded, "results": listed})
    if args.dump_logits:
        with open(args.dump_logits, "wb") as file:
            np.save(file, results[-1].logits.numpy())
    if args.plot:
        plot_prefill(listed, args.plot, caption(about, title(engine)))


if __name__ == "__main__":
    run(main)
