"""The demo: prefills a real long document with context parallelism, compares with one process, generates from it.

Start it plainly: it makes the document, runs one process for the reference, and then starts torchrun on itself.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import numpy as np
import torch

from dsa_engine import LLM, SamplingParams
from dsa_engine.arguments import check_outputs, read_text, run
from dsa_engine.measure.prefill_benchmark import measure_prefill
from dsa_engine.measure.report import environment, format_table, write_json
from dsa_engine.sizes import format_bytes


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nproc-per-node", type=int, default=2, help="processes")
    parser.add_argument("--prompt-file", metavar="PATH", help="a text; default: sources of Python's standard library")
    parser.add_argument("--tokens", type=int, default=16384, help="use this many tokens of the document")
    parser.add_argument("--max-tokens", type=int, default=64, help="tokens to generate")
    parser.add_argument("--json", metavar="PATH", help="write the result here")
    parser.add_argument("--reference", metavar="PATH", help=argparse.SUPPRESS)  # logits of the single process (.npy)
    return parser.parse_args()


def main() -> None:
    args = parse()
    if args.nproc_per_node < 1 or args.tokens < 1:
        raise ValueError(
            f"--nproc-per-node and --tokens must be at least 1, not {args.nproc_per_node} and {args.tokens}"
        )
    check_outputs(args.json)
    if "RANK" in os.environ:
        parallel(args)
    elif args.reference:
        single(args)
    else:
        start(args)


def start(args: argparse.Namespace) -> None:
    """Runs this script twice more: as one process, and under torchrun."""
    with tempfile.TemporaryDirectory() as folder:
        options = [*sys.argv[1:], "--reference", str(Path(folder, "single.npy"))]
        launcher = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={args.nproc_per_node}",
        ]
        for command in ([sys.executable], launcher):
            environment = {"OMP_NUM_THREADS": "1"} | os.environ
            done = subprocess.run([*command, __file__, *options], env=environment)
            if done.returncode:
                sys.exit(done.returncode)


def single(args: argparse.Namespace) -> None:
    """The reference: the same prefill in one process."""
    llm = load(args)
    prompt = document(llm, args)
    print(f"document: {len(prompt):,} tokens; reference prefill in one process …", flush=True)
    np.save(args.reference, llm.engine.prefill(prompt).numpy())


def parallel(args: argparse.Namespace) -> None:
    """Under torchrun: prefill, compare, generate, report."""
    llm = load(args)
    engine = llm.engine
    prompt = document(llm, args)
    result = measure_prefill(engine, prompt, warmup=0, repeat=1)
    (output,) = llm.generate([prompt], SamplingParams(temperature=0.0, max_tokens=args.max_tokens, ignore_eos=True))
    if engine.mesh.rank != 0:
        return
    reference = torch.from_numpy(np.load(args.reference))
    difference = (result.logits - reference).abs().max().item()
    relative = ((result.logits - reference).norm() / reference.norm()).item()
    rows = [
        (
            rank,
            format_bytes(peak),
            f"{pairs:,}",
            f"{pairs * len(result.attention_pairs) / sum(result.attention_pairs):.4f}",
        )
        for rank, (peak, pairs) in enumerate(zip(result.peak_memory_bytes, result.attention_pairs, strict=True))
    ]
    print(f"\nprefill of {len(prompt):,} tokens on {engine.mesh.world_size} ranks\n")
    print(format_table(("rank", "peak memory", "attention pairs", "of the mean"), rows))
    seconds = result.seconds[0]
    summary = [
        ("tokens", f"{len(prompt):,}"),
        ("TTFT", f"{seconds:.2f} s"),
        ("prefill", f"{len(prompt) / seconds:,.0f} tokens/s"),
        ("attention imbalance (max/mean)", f"{result.imbalance:.5f}"),
        ("largest difference from one process's logits", f"{difference:.2e}"),
        ("largest logit", f"{reference.abs().max().item():.2f}"),
        ("generated", f"{len(output.token_ids)} tokens"),
    ]
    if output.metrics.tpot_s is not None:
        summary.append(("time per output token", f"{output.metrics.tpot_s * 1e3:.1f} ms"))
    print("\n" + format_table(("", "value"), summary))
    print(f"\nthe text (the demo model is untrained, so it is noise): {output.text!r}")
    if args.json:
        where = environment(engine.mesh.device, engine.dtype, engine.mesh.world_size)
        figures = {"largest_difference": difference, "relative_difference": relative, "output_ids": output.token_ids}
        write_json(args.json, {**where, **result.to_json(), **figures})
    # Rounding alone gives 1e-6. It may also break a near tie in the selection the other way: one token of 256.
    if not relative <= 0.05:
        raise RuntimeError(f"context parallelism changed the logits by {relative:.1%}, more than rounding can")


def load(args: argparse.Namespace) -> LLM:
    """The demo model in float32, so that ranks can be compared; on the CPU unless every rank has a GPU."""
    enough = torch.cuda.device_count() >= args.nproc_per_node
    return LLM("demo", dtype="float32", device="cuda" if enough else "cpu")


def document(llm: LLM, args: argparse.Namespace) -> list[int]:
    """The first tokens of ``--prompt-file``, or of the standard library's sources in order of their names."""
    if args.prompt_file:
        text = read_text(args.prompt_file)
    else:
        text = ""
        for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
            text += path.read_text(encoding="utf-8", errors="replace")
            if len(text) >= args.tokens:
                break
    return llm.tokenizer.encode(text[: 8 * args.tokens])[: args.tokens]


if __name__ == "__main__":
    run(main)
