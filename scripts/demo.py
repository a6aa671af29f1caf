"""The demo: facts are scattered in a long document, and the model is asked for one of them.

Two processes prefill the document, context parallel, and answer; their results are compared with one process. Start
it without torchrun: it writes the document, runs one process for the reference, and then starts torchrun on itself.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import numpy as np
import torch

from dsa_engine import LLM, SamplingParams
from dsa_engine.arguments import argument_parser, read_text, run
from dsa_engine.commands.bench.prefill_benchmark import measure_prefill
from dsa_engine.measure.report import environment, format_table, write_json
from dsa_engine.system.output_files import check_outputs
from dsa_engine.system.sizes import format_bytes


def parse() -> argparse.Namespace:
    parser = argument_parser(__doc__)
    parser.add_argument("--nproc-per-node", type=int, default=2, help="processes")
    parser.add_argument("--prompt-file", metavar="PATH", help="a text; default: sources of Python's standard library")
    parser.add_argument(
        "--tokens", type=int, default=8192, help="maximum number of tokens of the document with its facts"
    )
    parser.add_argument("--depth", type=float, default=0.3, help="which fact is asked for: 0 the first, 1 the last")
    parser.add_argument("--max-tokens", type=int, default=16, help="maximum number of tokens of the answer")
    parser.add_argument("--json", metavar="PATH", help="write the result here; '-': to standard output")
    parser.add_argument("--reference", metavar="PATH", help=argparse.SUPPRESS)  # logits of the single process (.npy)
    return parser.parse_args()


def main() -> None:
    args = parse()
    if args.nproc_per_node < 1 or args.tokens < 1:
        raise ValueError(
            f"--nproc-per-node and --tokens must be at least 1, not {args.nproc_per_node} and {args.tokens}"
        )
    if not 0 <= args.depth <= 1:
        raise ValueError(f"--depth must be between 0 and 1, not {args.depth}")
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
    prompt, facts, _ = question(llm, args)
    print(f"document: {len(prompt):,} tokens, {len(facts)} facts in it; reference prefill in one process …", flush=True)
    np.save(args.reference, llm.engine.prefill(prompt).numpy())


def parallel(args: argparse.Namespace) -> None:
    """Under torchrun: prefill, compare, generate, report."""
    llm = load(args)
    engine = llm.engine
    prompt, facts, asked = question(llm, args)
    result = measure_prefill(engine, prompt, warmup=0, repeat=1)
    (output,) = llm.generate([prompt], SamplingParams(temperature=0.0, max_tokens=args.max_tokens))
    if engine.mesh.rank != 0:
        return
    reference = torch.from_numpy(np.load(args.reference))
    difference = (result.logits - reference).abs().max().item()
    relative = ((result.logits - reference).norm() / reference.norm()).item()
    right = output.text.strip() == facts[asked]
    if args.json:
        where = environment(engine.mesh.device, engine.dtype, engine.mesh.world_size)
        figures = {"largest_difference": difference, "relative_difference": relative, "output_ids": output.token_ids}
        figures |= {"answer": output.text, "fact": facts[asked], "right": right}
        write_json(args.json, {**where, **result.to_json(), **figures})
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
    print(f"\nquestion: {asked_for(facts[asked])}\nanswer:   {output.text.strip()}")
    print(f"after line {(asked + 1) * EVERY} of the text stands: {facts[asked]}")
    print("found, and right" if right else "the answer is WRONG")
    # Rounding alone gives 1e-6. It may also change the selection at a near tie: one token of 256.
    if not relative <= 0.05:
        raise RuntimeError(f"context parallelism changed the logits by {relative:.1%}, more than rounding can")


def load(args: argparse.Namespace) -> LLM:
    """The demo model in float32, so that ranks can be compared; on the CPU unless every rank has a GPU."""
    enough = torch.cuda.device_count() >= args.nproc_per_node
    return LLM("demo", dtype="float32", device="cuda" if enough else "cpu")


EVERY = 8  # lines of text between two facts


def question(llm: LLM, args: argparse.Namespace) -> tuple[list[int], list[str], int]:
    """The prompt, its facts, and the fact that it asks for.

    The document is the beginning of ``--prompt-file``, or of the standard library's sources in order of their names,
    with a fact after every few lines.
    """
    keys = random.Random(0).sample(range(10_000), k=10_000)
    values = random.Random(1)
    lines: list[str] = []
    facts: list[str] = []
    room = args.tokens - 16  # for the question
    for i, line in enumerate(text(args).splitlines(), 1):
        added = [line]
        if i % EVERY == 0:
            added.append(f"key {keys[len(facts)]:04} is {values.randrange(100):02}")
        room -= sum(len(llm.tokenizer.encode(line)) for line in added)  # the first token of each counts as its end
        if room < 0:
            break
        lines += added
        facts += added[1:]
    if not facts:
        raise ValueError(f"a document of {len(lines)} lines has no facts; give a longer one, or more --tokens")
    asked = round(args.depth * (len(facts) - 1))
    content = "\n".join([*lines, asked_for(facts[asked])])
    return llm.tokenizer.chat([{"role": "user", "content": content}]), facts, asked


def asked_for(fact: str) -> str:
    """``What is key 4821?`` for ``key 4821 is 97``."""
    return f"What is {fact.partition(' is ')[0]}?"


def text(args: argparse.Namespace) -> str:
    if args.prompt_file:
        return read_text(args.prompt_file)
    paths = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return "".join(path.read_text(encoding="utf-8", errors="replace") for path in paths[:40])


if __name__ == "__main__":
    run(main)
