"""Forms of context parallelism compared: bytes sent and held, work, and time of one prefill.

Cache rows by all-gather with tokens head-tail (the engine's way) or contiguous, heads by all-to-all (Ulysses, through
DeepSpeed's sequence layer), and a ring of blocks in two passes: one layer of DSA, the same weights and tokens. All
outputs are compared with those of a single process before anything is timed. Start it on two ranks or more:

    torchrun --nproc-per-node 2 scripts/studies/compare_context_parallel.py

Then it counts the same for a larger number of ranks, with times from stated assumptions.
"""

from __future__ import annotations

import argparse
import statistics
from importlib.util import find_spec
from typing import Any

import torch

from context_parallel.layer import SIZES, DSASize, Layer
from context_parallel.many_ranks import Counted, count
from context_parallel.plot import plot_forms
from context_parallel.study import FORMS, ContextParallelStudy, FormResult
from dsa_engine.arguments import add_json_argument, argument_parser, lengths, reported, run
from dsa_engine.config.model import DTYPES
from dsa_engine.measure.plots import check_plot
from dsa_engine.measure.report import environment, format_table, write_so_far
from dsa_engine.parallel import Mesh, ParallelConfig
from dsa_engine.parallel.links import Links
from dsa_engine.system.output_files import check_outputs
from dsa_engine.system.progress import progress_bar
from dsa_engine.system.sizes import format_bytes


def forms(text: str) -> list[str]:
    """ "head-tail,ring" as names of forms."""
    names = text.split(",")
    for name in names:
        if name not in FORMS:
            raise argparse.ArgumentTypeError(f"{name!r} is no form; give some of {','.join(FORMS)}")
    return names


def parse() -> argparse.Namespace:
    parser = argument_parser(__doc__)
    parser.add_argument("--size", choices=SIZES, help="size of the layer (default: v3.2 on a GPU, small on a CPU)")
    parser.add_argument("--seq-len", type=lengths, default=[2048, 4096, 8192], help="tokens of the sequence")
    parser.add_argument("--forms", type=forms, help="some of them (default: all; ulysses where DeepSpeed is installed)")
    parser.add_argument("--repeat", type=int, default=3, help="timed runs of each, in turn")
    parser.add_argument("--dtype", choices=DTYPES, help="default: bfloat16 on a GPU, float32 on a CPU")
    parser.add_argument("--device", default="auto", help="cpu, cuda or auto")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and tokens")
    parser.add_argument("--timeout", type=float, default=600, help="seconds until a rank that hangs ends the run")
    counted = parser.add_argument_group("counted, not measured")
    counted.add_argument("--counted-ranks", type=int, default=64, help="ranks of the world that is not there")
    counted.add_argument(
        "--counted-len", type=lengths, default=[8192, 32768, 131072, 524288], help="tokens of the sequence"
    )
    counted.add_argument("--counted-size", choices=SIZES, default="v3.2", help="size of the layer")
    counted.add_argument("--assumed-tflops", type=float, default=400, help="a rank's rate, 10^12 operations a second")
    counted.add_argument("--links", metavar="FILE", help="the links, as bench_prefill.py takes them")
    add_json_argument(parser)
    parser.add_argument("--plot", metavar="PATH", help="draw measured and counted times here (.png)")
    args = parser.parse_args()
    for name, least in (("repeat", 1), ("counted_ranks", 2)):
        if getattr(args, name) < least:
            raise ValueError(f"--{name.replace('_', '-')} must be at least {least}, not {getattr(args, name)}")
    if not 0 < args.assumed_tflops < float("inf"):
        raise ValueError(f"--assumed-tflops must be a rate above 0, not {args.assumed_tflops}")
    return args


@torch.inference_mode()
def main() -> None:
    args = parse()
    check_outputs(args.json, args.plot)
    check_plot(args.plot)
    links = Links.read(args.links) if args.links else Links()
    mesh = Mesh.create(ParallelConfig(timeout=args.timeout), args.device, same=lambda: {"options": str(vars(args))})
    cuda = mesh.device.type == "cuda"
    args.size = args.size or ("v3.2" if cuda else "small")
    args.dtype = args.dtype or ("bfloat16" if cuda else "float32")
    left_out = {} if args.forms else not_here(SIZES[args.size], mesh.world_size)
    names = args.forms or [name for name in FORMS if name not in left_out]
    counted = count_all(args, links)
    study = ContextParallelStudy(Layer(SIZES[args.size], DTYPES[args.dtype], mesh.device, args.seed), mesh, names)
    about = environment(mesh.device, DTYPES[args.dtype], mesh.world_size)
    assumed = {"links": links.to_json(), "tflops": args.assumed_tflops, "dtype": "bfloat16", "size": args.counted_size}
    facts = {**about, "options": reported(args), "assumed": assumed, "counted": [c.to_json() for c in counted]}
    results: list[FormResult] = []
    with progress_bar(len(args.seq_len), "lengths", "comparing", shown=mesh.is_leader) as bar:
        for i, length in enumerate(args.seq_len, 1):
            results += study.measure(length, args.repeat)
            if mesh.is_leader:
                listed = [r.to_json() for r in results]
                write_so_far(args.json, facts, listed, complete=i == len(args.seq_len))
            bar.update(1)
    if not mesh.is_leader:
        return
    if args.plot:
        where = (f"{args.size}, {mesh.world_size} ranks", about["device"], args.dtype, about["date"][:10])
        modelled = f"{args.counted_size} on {args.counted_ranks} ranks at {args.assumed_tflops:g} TFLOP/s each"
        plot_forms(results, counted, args.plot, "Measured: " + " · ".join(where), f"Modelled, not measured: {modelled}")
    show(args, results, counted, links, left_out)


def not_here(size: DSASize, ranks: int) -> dict[str, str]:
    """Forms that cannot be run, and why."""
    refusals = {name: form.refusal(size, ranks) for name, form in FORMS.items()}
    if not refusals["ulysses"] and find_spec("deepspeed") is None:
        refusals["ulysses"] = (
            "ulysses needs DeepSpeed, which is not installed (pip install --no-build-isolation 'dsa-engine[deepspeed]')"
        )
    return {name: why for name, why in refusals.items() if why}


def count_all(args: argparse.Namespace, links: Links) -> list[Counted]:
    """Counts every form that so many ranks can run, measured or not."""
    size, ranks = SIZES[args.counted_size], args.counted_ranks
    able = [form for form in FORMS.values() if form.refusal(size, ranks) is None]
    return [count(form, size, n, ranks, links, args.assumed_tflops) for n in args.counted_len for form in able]


def show(
    args: argparse.Namespace, results: list[FormResult], counted: list[Counted], links: Links, left_out: dict[str, str]
) -> None:
    print(f"Measured, one layer of size {args.size}, {results[0].ranks} ranks; of the slowest rank:\n")
    measured = ("tokens, form", "median ms", "sends", "by formula", "imbalance", "by formula", "run adds", "difference")
    print(format_table(measured, [measured_row(r) for r in results]))
    for why in left_out.values():
        print(f"\nleft out: {why}")
    print(
        f"\nCounted, one layer of {args.counted_size} in bfloat16 on {args.counted_ranks} ranks. Times are modelled "
        f"and assume\n{args.assumed_tflops:g} TFLOP/s for all work; {links}.\n* is the least:\n"
    )
    columns = ("tokens, form", "sends", "messages", "imbalance", "holds")
    times = ("work ms", "links ms", "waits ms", "total ms")
    least = {n: min(c.total_ms for c in counted if c.length == n) for n in args.counted_len}
    print(format_table((*columns, *times), [counted_row(c, least[c.length]) for c in counted]))
    print(
        "\nHow to read it: a form costs the work of its busiest rank (imbalance), and waiting for what no work covers. "
        "What\nis sent matters where it is not covered: at short lengths, on many ranks, on slow links. On a CPU ranks "
        "share memory\nand cores, so time shows work and copies, not links. docs/CONTEXT_PARALLEL.md says which form "
        "wins where, and why."
    )


def measured_row(r: FormResult) -> tuple[Any, ...]:
    return (
        f"{r.length:,} {r.form}",
        statistics.median(r.seconds) * 1e3,
        format_bytes(r.sent_bytes),
        format_bytes(r.sent_bytes_by_formula),
        f"{r.imbalance:.3f}",
        f"{r.imbalance_by_formula:.3f}",
        format_bytes(r.added_bytes),
        f"{r.relative_error:.1e}",
    )


def counted_row(c: Counted, least: float) -> tuple[Any, ...]:
    return (
        f"{c.length:,} {c.form}",
        format_bytes(c.sent_bytes),
        c.messages,
        f"{c.imbalance:.3f}",
        format_bytes(c.held_bytes),
        f"{c.work_ms:.2f}",
        f"{c.communication_ms:.2f}",
        f"{c.exposed_ms:.2f}",
        f"{c.total_ms:.2f}" + ("*" if c.total_ms == least else " "),
    )


if __name__ == "__main__":
    run(main)
