"""The options of ``dsa-engine plan``."""

from __future__ import annotations

import argparse

from dsa_engine.commands.planner.choices import AXES, CACHES, DISPATCH_DTYPES, DISPATCHES, DRAFTS, WEIGHTS
from dsa_engine.commands.planner.prediction.devices import DEVICES
from dsa_engine.config.released import RELEASED_CONFIGS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    names = ", ".join(RELEASED_CONFIGS)
    parser.add_argument("--model", default="deepseek_v32", help=f"a folder with a config.json, or one of {names}")
    parser.add_argument("--hf-overrides", default="{}", metavar="JSON", help="keys that replace those of config.json")
    parser.add_argument("--device", default="H200", help=f"one of {', '.join(DEVICES)}")
    parser.add_argument("--devices", type=int, default=8, help="number of devices")
    parser.add_argument("--input-len", type=int, default=131072, help="tokens of a prompt")
    parser.add_argument("--output-len", type=int, default=1024, help="tokens of an answer")
    parser.add_argument("--ttft", type=float, metavar="SECONDS", help="limit of the time to first token")
    parser.add_argument("--tpot", type=float, metavar="SECONDS", help="limit of the time per output token")
    parser.add_argument("--requests", type=int, help="number of concurrent requests; default: the best")
    parser.add_argument("--acceptance", metavar="RATES", help="acceptance of drafts by position, such as 0.85,0.7")
    for option, name, kind, about in (
        ("--cp-size", "cp_size", int, "ranks that prefill a prompt together"),
        ("--tp-size", "tp_size", int, "ranks that divide embedding, o_proj and LM head"),
        ("--chunk", "chunk", int, "tokens of a rank in a prefill step (--max-num-batched-tokens of the engine)"),
        ("--drafts", "drafts", int, f"drafts of the MTP module in a step, one of {DRAFTS}"),
    ):
        parser.add_argument(option, dest=name, type=kind, help=f"fix it: {about}")
    parser.add_argument("--weights", choices=WEIGHTS, help="fix the format of weights")
    parser.add_argument("--cache", choices=CACHES, help="fix the format of caches")
    dispatches = (*DISPATCHES, "auto")
    parser.add_argument("--moe-dispatch", choices=dispatches, help="fix how prefill brings tokens to experts")
    parser.add_argument("--decode-dispatch", choices=dispatches, help="fix how decode brings tokens to experts")
    parser.add_argument(
        "--dispatch-dtype",
        choices=DISPATCH_DTYPES,
        help="numbers of a token on its way to FP8 experts; default: fp8",
    )
    parser.add_argument(
        "--combine-dtype",
        choices=DISPATCH_DTYPES,
        help="numbers of the experts' sums on their way back, except in an all-gather dispatch; default: bfloat16",
    )
    parser.add_argument(
        "--prefetch-weights",
        action=argparse.BooleanOptionalAction,
        help="in decode, the next layer's first weights come into the L2 cache while sums travel back; default: no",
    )
    parser.add_argument(
        "--enable-dbo",
        dest="two_batches",
        action=argparse.BooleanOptionalAction,
        help="fix whether a step is cut into two batches, one of which computes while the other's tokens travel",
    )
    parser.add_argument(
        "--redundant-experts", type=int, metavar="N", help="replicas of experts, on all ranks together; default: 0"
    )
    parser.add_argument(
        "--imbalance",
        type=float,
        metavar="FACTOR",
        help="token-expert pairs of the busiest rank over the mean, with these replicas; default: 1",
    )
    parser.add_argument(
        "--measured",
        metavar="FILES",
        help="JSON of the benchmarks on --device, separated by commas: their ceilings and stages replace "
        "the data sheet and the assumed fractions",
    )
    parser.add_argument("--what-if", choices=AXES, help="change this, and plan for every value")
    parser.add_argument("--plot", metavar="PATH", help="draw --what-if here (.png)")
    parser.add_argument("--published", action="store_true", help="predict deployments that others have reported")
    parser.add_argument(
        "--check",
        action="store_true",
        help="measure small and larger runs of the demo model here, and predict the larger from the small; also under "
        "torchrun. With --measured: compare the handovers of these files of scripts/bench_disaggregated.py",
    )
    parser.add_argument("--json", metavar="PATH", help="write the plans here too; '-': to standard output")
