"""The options of ``dsa-engine bench``: of prefill, ttft and tpot."""

from __future__ import annotations

import argparse
from functools import partial

from dsa_engine.commands.arguments import add_engine_arguments, add_json_argument, lengths
from dsa_engine.config.speculative import MAX_DRAFTS

OUTPUT_LEN = {"ttft": 1, "tpot": 64}  # tokens per request by default


def add_prefill_arguments(parser: argparse.ArgumentParser) -> None:
    prompt = parser.add_mutually_exclusive_group()
    prompt.add_argument(
        "--input-len", type=lengths, default=[8192], help="lengths of random prompts, such as 8192,32768"
    )
    prompt.add_argument("--prompt-file", metavar="PATH", help="prefill this text instead")
    parser.add_argument("--dump-logits", metavar="PATH", help="write the last position's logits (.npy) here")
    _add_common_arguments(parser)


def _add_latency_arguments(metric: str, parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--input-len", type=lengths, default=[8192, 32768, 131072], help="prompt lengths, in tokens")
    parser.add_argument(
        "--batch-size", type=lengths, default=[1], help="requests at once, of all ranks together, such as 1,8"
    )
    parser.add_argument("--output-len", type=int, default=OUTPUT_LEN[metric], help="tokens per request")
    if metric == "tpot":
        parser.add_argument(
            "--fill-cache",
            choices=("random",),
            help="fill the caches with random rows instead of computing the prompts",
        )
        parser.add_argument(
            "--num-speculative-tokens",
            type=draft_counts,
            metavar="LIST",
            help="drafts a step, such as 0,1,2,3: one after the other in one run (default: of --speculative-config)",
        )
    parser.add_argument(
        "--acceptance",
        metavar="RATES",
        help="with drafts: assume that so many are accepted, by position, such as 0.9,0.8; default: what the model "
        "says, or where caches are random or ranks emulated 0.85 and falling",
    )
    _add_common_arguments(parser)


add_ttft_arguments, add_tpot_arguments = (partial(_add_latency_arguments, metric) for metric in OUTPUT_LEN)


def _add_common_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the runs and of the engine; ``dsa_engine.measure.emulation.arguments.measured_llm`` reads these."""
    parser.add_argument("--warmup", type=int, default=1, help="runs that are not counted")
    parser.add_argument("--repeat", type=int, default=3, help="runs that are")
    add_json_argument(parser)
    parser.add_argument("--plot", metavar="PATH", help="draw times and stages here (.png)")
    parser.add_argument("--profile", metavar="PATH", help="write a Chrome trace of one more run on rank 0 here")
    add_engine_arguments(parser)
    group = parser.add_argument_group("one rank of many (in one process, without torchrun)")
    group.add_argument(
        "--emulate-world",
        type=int,
        metavar="N",
        help="run the work of one rank of N, with copies in place of messages; tokens mean nothing",
    )
    group.add_argument("--emulate-rank", type=int, metavar="R", help="which rank, from 0 (default: 0)")


def draft_counts(text: str) -> list[int]:
    """ "0,1,2,3" as numbers of drafts."""
    parts = text.split(",")
    if not all(part.isdecimal() and int(part) <= MAX_DRAFTS for part in parts):
        raise argparse.ArgumentTypeError(
            f"give numbers from 0 to {MAX_DRAFTS} separated by commas, such as 0,1,2,3, not {text!r}"
        )
    return [int(part) for part in parts]
