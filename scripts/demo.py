"""The demo: facts are scattered in a long document, and the model is asked for one of them.

A text of your own (--prompt-file) may end in the question, such as "What is key 4821?" after a line "key 4821 is 97".

Two processes prefill the document, context parallel, and answer; their results are compared with one process. Start
it without torchrun: it computes the reference, and then starts torchrun on itself.
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
from typing import NamedTuple

import numpy as np
import torch

from dsa_engine import LLM, SamplingParams
from dsa_engine.commands.arguments import add_json_argument, argument_parser, read_text, run
from dsa_engine.commands.bench.prefill_benchmark import measure_prefill
from dsa_engine.engine.calls.jobs import prefill
from dsa_engine.measure.report import environment, format_table, write_json
from dsa_engine.system.output_files import check_outputs
from dsa_engine.system.sizes import format_bytes
from dsa_engine.text.conversations import ConversationFormat
from dsa_engine.text.tokenizer import Tokenizer


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--nproc-per-node", type=int, default=2, help="processes")
    text = "a text; if its last line ends in a question mark, that is asked, and no facts are added; default: "
    parser.add_argument("--prompt-file", metavar="PATH", help=text + "sources of Python's standard library")
    parser.add_argument("--tokens", type=int, default=8192, help="maximum number of tokens, of document and facts")
    parser.add_argument("--depth", type=float, default=0.3, help="which fact is asked for: 0 the first, 1 the last")
    add_json_argument(parser)
    parser.add_argument("--reference", metavar="PATH", help=argparse.SUPPRESS)  # logits of the single process (.npy)
    args = parser.parse_args()
    if args.nproc_per_node < 1 or args.tokens < 1:
        raise ValueError(
            f"--nproc-per-node and --tokens must be at least 1, not {args.nproc_per_node} and {args.tokens}"
        )
    if not 0 <= args.depth <= 1:
        raise ValueError(f"--depth must be between 0 and 1, not {args.depth}")
    check_outputs(args.json)
    if "RANK" in os.environ:
        parallel(args)
    else:
        start(args)


def start(args: argparse.Namespace) -> None:
    """Prefills the document in this process, for the reference, and then runs this script under torchrun."""
    llm = load(args)
    asked = question(llm.tokenizer, args)
    print(f"document: {len(asked.prompt):,} tokens; reference prefill in one process …", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        reference = str(Path(folder, "single.npy"))
        np.save(reference, prefill(llm.engine, asked.prompt).numpy())
        llm.close()
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc-per-node={args.nproc_per_node}", __file__, *sys.argv[1:], "--reference", reference]
        done = subprocess.run(command, env={"OMP_NUM_THREADS": "1"} | os.environ)
        if done.returncode:
            sys.exit(done.returncode)


def parallel(args: argparse.Namespace) -> None:
    """Under torchrun: prefill, compare, generate, report."""
    llm = load(args)
    engine, asked = llm.engine, question(llm.tokenizer, args)
    prompt = asked.prompt
    result = measure_prefill(engine, prompt, warmup=0, repeat=1)
    (seconds,) = result.ttft
    (output,) = llm.generate([prompt], SamplingParams(temperature=0.0, max_tokens=16))
    if engine.mesh.rank != 0:
        return
    reference = torch.from_numpy(np.load(args.reference))
    difference = (result.logits - reference).abs().max().item()
    relative = ((result.logits - reference).norm() / reference.norm()).item()
    right = None if asked.fact is None else output.text.strip() == asked.fact
    if args.json:
        figures = {"largest_difference": difference, "relative_difference": relative, "output_ids": output.token_ids}
        figures |= {"answer": output.text, "fact": asked.fact, "right": right}
        about = environment(engine.mesh.device, engine.dtype, engine.mesh.world_size)
        write_json(args.json, about | result.to_json() | figures)
    print(f"\nprefill of {len(prompt):,} tokens on {engine.mesh.world_size} ranks\n")
    summary = [
        ("prefill", f"{seconds:.2f} s, {len(prompt) / seconds:,.0f} tokens/s"),
        ("peak memory of a rank", format_bytes(max(result.peak_memory_bytes))),
        ("attention imbalance (max/mean)", f"{result.imbalance:.5f}"),
        ("largest difference from one process's logits", f"{difference:.2e}"),
        ("largest logit", f"{reference.abs().max().item():.2f}"),
    ]
    print("\n" + format_table(("", "value"), summary))
    print(f"\nquestion: {asked.question}\nanswer:   {output.text.strip()}")
    if asked.fact is None:
        print("the text has no line such as 'key 4821 is 97' that answers the question, so the answer is not checked")
    else:
        print(f"{asked.where} stands: {asked.fact}")
        print("found, and right" if right else "the answer is WRONG")
    # Rounding alone gives 1e-6. It may also change the selection at a near tie: one token of 256.
    if not relative <= 0.05:
        raise RuntimeError(f"context parallelism changed the logits by {relative:.1%}, more than rounding can")


def load(args: argparse.Namespace) -> LLM:
    """The demo model in float32, so that ranks can be compared; on the CPU unless every rank has a GPU. Caches are
    small, as the process of the reference keeps its own while the ranks run."""
    enough = torch.cuda.device_count() >= args.nproc_per_node
    return LLM("demo", dtype="float32", device="cuda" if enough else "cpu", cache_memory="1GiB")


class Question(NamedTuple):
    """A prompt that ends in a question; ``fact`` is the line that answers it, None if it is not known."""

    prompt: list[int]
    question: str
    fact: str | None
    where: str


def question(tokenizer: Tokenizer, args: argparse.Namespace) -> Question:
    """The question at the end of the text, if there is one; else a question for a fact that is added to it.

    Raises:
        ValueError: the text and its question take more than ``--tokens``.
    """
    stdlib = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:40]
    text = read_text(args.prompt_file) if args.prompt_file else "".join(path.read_text("utf-8") for path in stdlib)
    if not args.prompt_file or not text.rstrip().endswith("?"):
        return added_question(tokenizer, text.splitlines(), args)
    lines = [line.strip() for line in text.rstrip().splitlines()]
    prompt = ConversationFormat(tokenizer).token_ids([{"role": "user", "content": text.strip()}])
    if len(prompt) > args.tokens:
        raise ValueError(
            f"{args.prompt_file} takes {len(prompt):,} tokens with its question; --tokens {args.tokens} allows fewer"
        )
    answers = [(i, line) for i, line in enumerate(lines, 1) if lines[-1] == asked_for(line)]
    number, fact = answers[-1] if answers else (0, None)
    return Question(prompt, lines[-1], fact, f"in line {number} of the text")


def added_question(tokenizer: Tokenizer, text_lines: list[str], args: argparse.Namespace) -> Question:
    """The document is the beginning of the text, with a fact after every few lines."""
    keys, values = random.Random(0).sample(range(10_000), k=10_000), random.Random(1)
    every = max(1, min(8, len(text_lines)))  # a short text has a fact too
    lines, facts = list[str](), list[str]()
    room = args.tokens - 16  # for the question
    for i, line in enumerate(text_lines, 1):
        added = [line]
        if i % every == 0:
            added.append(f"key {keys[len(facts)]:04} is {values.randrange(100):02}")
        room -= sum(len(tokenizer.encode(line)) for line in added)  # the first token of each counts as its end
        if room < 0:
            break
        lines += added
        facts += added[1:]
    if not facts:
        raise ValueError(f"{args.tokens} tokens hold {len(lines)} lines and no fact; give more --tokens")
    asked = round(args.depth * (len(facts) - 1))
    content = "\n".join([*lines, asked_for(facts[asked])])
    prompt = ConversationFormat(tokenizer).token_ids([{"role": "user", "content": content}])
    return Question(prompt, asked_for(facts[asked]), facts[asked], f"after line {(asked + 1) * every} of the text")


def asked_for(fact: str) -> str:
    """``What is key 4821?`` for ``key 4821 is 97``."""
    return f"What is {fact.partition(' is ')[0]}?"


if __name__ == "__main__":
    run(main)
