"""TTFT at 128K and TPOT of DeepSeek-V3.2 on 64 H200 as the planner predicts them, with one more change in each row.

Everything is modelled: counted work, fractions of a device's peak that were estimated, links by their data sheets.
Nothing was measured on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from dsa_engine.arguments import add_json_argument, argument_parser, run
from dsa_engine.commands.planner.deployment import Deployment, Placed
from dsa_engine.commands.planner.devices import DEVICES
from dsa_engine.commands.planner.efficiency import Efficiencies
from dsa_engine.commands.planner.predict import predict_decode, predict_prefill
from dsa_engine.config.model import ModelConfig
from dsa_engine.config.released import released_config
from dsa_engine.measure.report import format_table, write_json

RANKS, TOKENS, OUTPUT, REQUESTS = 64, 131_072, 1024, 64
MANY = 512  # requests, so that each rank can cut its own into two batches in decode
DRAFTED = 2.5  # tokens of a step with three drafts; 2.16 times the speed is published for 8 B200
SKEW = {0: 2.1, RANKS: 1.1}  # busiest rank over the mean by redundant experts: a load by Zipf's law, assumed


class Step(NamedTuple):
    """A change, and the deployments that have it and those before it."""

    name: str
    prefill: Deployment
    decode: Deployment


def steps() -> Iterator[Step]:
    prefill = Deployment(RANKS, RANKS, cache="fp8")
    decode = replace(prefill, tp_size=8, dispatch="all_gather")
    changes: tuple[tuple[str, dict[str, Any], dict[str, Any]], ...] = (
        ("as before", {}, {}),
        ("+ shared expert beside the dispatch", {"beside_shared": True}, {"beside_shared": True}),
        ("+ tokens in FP8", {"dispatch_dtype": "fp8"}, {"dispatch_dtype": "fp8"}),
        ("+ dispatch by machine in prefill", {"dispatch": "by_machine"}, {}),
        ("+ sums in FP8 in prefill", {"combine_dtype": "fp8"}, {}),
        ("+ prefetch of weights in decode", {}, {"prefetch_weights": True}),
        ("+ two batches in prefill", {"two_batches": True}, {}),
        ("+ 64 redundant experts", {"redundant": RANKS}, {"redundant": RANKS}),
        ("+ three drafts", {}, {"drafts": 3}),
    )
    for name, of_prefill, of_decode in changes:
        prefill, decode = replace(prefill, **of_prefill), replace(decode, **of_decode)
        yield Step(name, prefill, decode)


def predicted(step: Step, skewed: bool, requests: int = REQUESTS) -> tuple[float, float, float]:
    """TTFT and TPOT in milliseconds, and GiB that remain on a rank in decode."""
    config, reached = ModelConfig.from_dict(released_config("deepseek_v32")), Efficiencies.assumed()
    prefill, decode = (
        replace(how, imbalance=SKEW[how.redundant] if skewed else 1.0) for how in (step.prefill, step.decode)
    )
    ttft = predict_prefill(Placed(config, DEVICES["H200"], prefill), reached, TOKENS).ttft
    gained = DRAFTED if decode.drafts else 1.0
    placed, context = Placed(config, DEVICES["H200"], decode), TOKENS + OUTPUT // 2
    one = predict_decode(placed, reached, requests, context, gained, TOKENS + OUTPUT)
    return ttft * 1e3, one.tpot * 1e3, one.room / 2**30


def in_decode(step: Step) -> tuple[float, float]:
    """TPOT in milliseconds of ``MANY`` requests in one batch and in two."""
    one, two = (step._replace(decode=replace(step.decode, two_batches=cut)) for cut in (False, True))
    return predicted(one, False, MANY)[1], predicted(two, False, MANY)[1]


def main() -> None:
    parser = argument_parser(__doc__)
    add_json_argument(parser)
    args = parser.parse_args()
    rows, results = [], []
    for step in steps():
        even, skewed = predicted(step, False), predicted(step, True)
        rows.append(
            (step.name, *(f"{x:.0f}" for x in (even[0], skewed[0])), *(f"{x:.1f}" for x in (even[1], skewed[1])))
        )
        names = ("ttft_ms", "tpot_ms", "room_gib")
        results.append({"step": step.name, "even": dict(zip(names, even)), "skewed": dict(zip(names, skewed))})
    one, two = in_decode(next(step for step in steps() if step.prefill.two_batches))
    if args.json:
        about = {"modelled": True, "skew": SKEW, "tokens_per_step": DRAFTED}
        decode = {"requests": MANY, "tpot_ms": one, "tpot_ms_two_batches": two}
        write_json(args.json, {**about, "steps": results, "two_batches_in_decode": decode})
    header = ("change", "TTFT ms", "TTFT ms, skewed", "TPOT ms", "TPOT ms, skewed")
    print(f"Modelled, DeepSeek-V3.2 on {RANKS} H200, {TOKENS:,} tokens, {REQUESTS} requests; nothing was measured")
    print(format_table(header, rows))
    print(f"TPOT of {MANY} requests without drafts: {one:.1f} ms, with two batches in decode {two:.1f} ms")


if __name__ == "__main__":
    run(main)
