"""The engine beside ``transformers``: same checkpoint, same threads, one process, runs in turn; prints the ratios.

Logits and greedy tokens of the two are compared too. The prefill of ``transformers`` is quadratic in
time and memory (8,192 tokens of the demo model on one thread: about two minutes and 10 GiB per run).
"""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path
from typing import Any

import torch

from dsa_engine import LLM
from dsa_engine.commands.arguments import add_json_argument, argument_parser, lengths, run
from dsa_engine.commands.bench.peak_fractions import PeakFractions, print_peak_fractions
from dsa_engine.config.model import ModelConfig
from dsa_engine.measure.report import environment, format_table, write_json
from dsa_engine.system.output_files import check_outputs
from dsa_engine.system.progress import progress_bar
from dsa_engine.system.sizes import available_bytes, format_bytes
from dsa_engine.weights.model_folder import resolve_model
from transformers_comparison import (
    compare_decode,
    compare_prefill,
    float32_checkpoint,
    load_transformers,
    prefill_bytes,
)


def parse() -> argparse.Namespace:
    parser = argument_parser(__doc__)
    parser.add_argument("--model", default="demo", help="a Hugging Face model folder, or 'demo' (default)")
    parser.add_argument("--seq-len", type=lengths, default=[4096], help="prompt lengths for prefill")
    parser.add_argument("--context", type=lengths, default=[2048], help="context lengths for decode")
    parser.add_argument("--batch-size", type=lengths, default=[1, 8], help="batch sizes for decode")
    parser.add_argument("--output-len", type=int, default=16, help="tokens to decode")
    parser.add_argument("--repeat", type=int, default=3, help="runs of each, in turn")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="threads of both")
    add_json_argument(parser)
    return parser.parse_args()


def main() -> None:
    args = parse()
    if min(args.repeat, args.threads) < 1 or args.output_len < 2:
        raise ValueError("--repeat and --threads must be at least 1, --output-len at least 2")
    check_outputs(args.json)
    if not Path("/proc/self/clear_refs").exists():
        raise ValueError("peak memory is read from /proc, which only Linux has")
    torch.set_num_threads(args.threads)
    check_memory(args)
    with float32_checkpoint(resolve_model(args.model)) as folder:
        theirs = load_transformers(folder)
        longest = max(args.seq_len + [c + args.output_len for c in args.context])
        options = {"max_num_seqs": max(args.batch_size), "max_model_len": longest, "enable_prefix_caching": False}
        llm = LLM(folder, dtype="float32", device="cpu", **options)
    fractions = PeakFractions(llm.engine)
    results = []
    decodes = list(itertools.product(args.context, args.batch_size))
    with progress_bar(2 * args.repeat * (len(args.seq_len) + len(decodes)), "runs", "comparing") as bar:
        for n in args.seq_len:
            result = compare_prefill(llm, theirs, n, args.repeat, bar)
            results.append(result | fractions.prefill(n, n / result["engine"]))
        for context, batch in decodes:
            results.append(compare_decode(llm, theirs, context, batch, args.output_len, args.repeat, bar))
    about = environment(torch.device("cpu"), torch.float32, 1)
    if args.json:
        write_json(
            args.json, {**about, "ceilings": fractions.ceilings.to_json(), "model": args.model, "results": results}
        )
    header = ("", "dsa_engine", "transformers", "ratio", "dsa_engine memory", "transformers memory", "difference")
    print(format_table(header, [row(r) for r in results]))
    print_peak_fractions([r["name"] for r in results], results, fractions.ceilings)
    print(
        "\nRatios are of medians over runs in turn. They grow with the prompt and the batch: transformers scores and\n"
        "attends to every pair of tokens and runs every expert by itself; of one short request little is saved."
    )


def check_memory(args: argparse.Namespace) -> None:
    """Prints the memory that the largest prefill takes; ``ValueError`` if less is available."""
    config = ModelConfig.from_pretrained(resolve_model(args.model))
    cases = [(n, 1) for n in args.seq_len] + list(itertools.product(args.context, args.batch_size))
    needed, length, batch = max((prefill_bytes(config, *case), *case) for case in cases)
    said = (
        f"transformers takes up to about {format_bytes(needed)} beside the weights, for {batch} prompt(s) of "
        f"{length:,} tokens; {format_bytes(available_bytes())} are available"
    )
    if needed > available_bytes():
        raise ValueError(f"{said}: give a shorter --seq-len or --context, or a smaller --batch-size")
    print(said, flush=True)


def row(r: dict[str, Any]) -> tuple[str, ...]:
    if "relative_error" in r:
        difference = f"logits {r['relative_error']:.1e}"
    else:
        difference = f"{r['equal_tokens']} of {r['tokens']} tokens equal"
    return (
        r["name"],
        f"{r['engine']:,.1f} {r['unit']}",
        f"{r['transformers']:,.1f} {r['unit']}",
        f"{r['ratio']:.1f}x",
        format_bytes(r["engine_peak_bytes"]),
        format_bytes(r["transformers_peak_bytes"]),
        difference,
    )


if __name__ == "__main__":
    run(main)
