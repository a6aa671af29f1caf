"""Forms of Multi-head Latent Attention in decode: cached bytes, operations and time of each.

Cache decompressed (CD) and compressed (CC), W_UK and W_UV absorbed (A_CC), without copying the cache rows together
(A_CC_ME), weights multiplied beforehand (AM_CC_ME), and the engine's kernel: one layer, one new token per sequence, the
same weights. All outputs are compared before anything is timed.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import torch

from dsa_engine.arguments import argument_parser, lengths, reported, run
from dsa_engine.config.model import DTYPES
from dsa_engine.measure.plots import check_plot
from dsa_engine.measure.report import environment, format_table, write_so_far
from dsa_engine.system.output_files import check_outputs
from dsa_engine.system.progress import progress_bar
from dsa_engine.system.sizes import format_bytes
from mla.forms import FORMS, SIZES
from mla.study import Counts, FormResult, MLAStudy, count, plot_mla

MAX_ERROR = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 5e-2}


def parse() -> argparse.Namespace:
    parser = argument_parser(__doc__)
    parser.add_argument("--size", choices=SIZES, default="v3.2", help="whose attention")
    parser.add_argument("--context", type=lengths, default=[512, 1024, 2048], help="cached tokens of a sequence")
    parser.add_argument("--batch-size", type=lengths, default=[1, 4], help="sequences at once")
    parser.add_argument("--repeat", type=int, default=3, help="timed runs of each, in turn")
    parser.add_argument("--dtype", choices=DTYPES, help="default: bfloat16 on a GPU, float32 on a CPU")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu or cuda")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and caches")
    parser.add_argument("--json", metavar="PATH", help="write the result here; '-': to standard output")
    parser.add_argument("--plot", metavar="PATH", help="draw times and counts here (.png)")
    args = parser.parse_args()
    if args.repeat < 1:
        raise ValueError(f"--repeat must be at least 1, not {args.repeat}")
    args.dtype = args.dtype or ("bfloat16" if args.device.startswith("cuda") else "float32")
    return args


@torch.inference_mode()
def main() -> None:
    args = parse()
    check_outputs(args.json, args.plot)
    check_plot(args.plot)
    device, dtype = torch.device(args.device), DTYPES[args.dtype]
    counts = {form.name: count(form, SIZES[args.size]) for form in FORMS}
    study = MLAStudy(SIZES[args.size], dtype, device, args.seed)
    cases = [(batch, context) for batch in args.batch_size for context in args.context]
    about = {
        **environment(device, dtype, 1),
        "options": reported(args),
        "counted": {n: vars(counts[n]) for n in counts},
    }
    results: list[FormResult] = []
    try:
        with progress_bar(len(cases), "cases", "comparing") as bar:
            for batch, context in cases:
                results += study.measure(batch, context, args.repeat, MAX_ERROR[args.dtype])
                done = (batch, context) == cases[-1]
                write_so_far(args.json, about, [r.to_json() for r in results], complete=done)
                bar.update(1)
    except KeyboardInterrupt:
        show(counts, results)
        raise
    if args.plot:
        where = (f"MLA of {args.size}, one layer", about["device"], args.dtype, about["date"][:10])
        plot_mla(counts, results, args.plot, " · ".join(where))
    show(counts, results)


def show(counts: dict[str, Counts], results: list[FormResult]) -> None:
    rows: list[tuple[Any, ...]] = [
        (
            name,
            f"{c.cache_bytes_per_token / 1e3:.3f}",
            f"{c.flops_per_cached_token / 1e6:.2f}",
            f"{c.flops_per_new_token / 1e6:.1f}",
            format_bytes(c.weight_bytes),
        )
        for name, c in counts.items()
    ]
    per_token = ("cache kB a token", "MFLOP a cached token", "MFLOP a new token", "weights read")
    print("Counted, one layer, bfloat16:\n\n" + format_table(("form", *per_token), rows))
    for batch, context in dict.fromkeys((r.batch_size, r.context) for r in results):
        cases = [r for r in results if (r.batch_size, r.context) == (batch, context)]
        engine = statistics.median(next(r for r in cases if r.form == "engine").seconds)
        rows = [
            (
                r.form,
                statistics.median(r.seconds) * 1e3,
                f"{statistics.median(r.seconds) / engine:.2f}",
                format_bytes(r.cache_bytes),
                format_bytes(r.added_bytes),
                f"{r.relative_error:.1e}",
            )
            for r in cases
        ]
        header = ("form", "median ms", "/ engine", "cache", "step adds", "difference to CD")
        print(f"\nMeasured, batch {batch}, {context:,} cached tokens each:\n\n" + format_table(header, rows))
    print(
        "\nRead both together: a step takes the longer of its operations and of reading cache and weights.\n"
        "docs/MLA.md says which form wins where, and why the engine does what it does."
    )


if __name__ == "__main__":
    run(main)
