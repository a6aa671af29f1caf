"""Cost in accuracy of rounding the experts' sums on their way back: scripts/compare_returned_sums.py

One process computes the demo model in FP8, as if every expert were on a rank of its own: each rank's weighted sum of a
token is rounded before the sums are added. Printed, of held-out texts, against sums that are not rounded: the relative
error of the logits, the KL divergence in nats per token, the fraction of equal greedy tokens, and the perplexity.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from unittest.mock import patch

import torch

from demo_model.evaluation.quality import SEED, held_out
from dsa_engine import LLM
from dsa_engine.arguments import add_json_argument, argument_parser, run
from dsa_engine.kernels.formats.quantize import quantize_rows
from dsa_engine.measure.report import format_table, run_report, write_json
from dsa_engine.parallel.experts.dispatch import Received
from dsa_engine.quantization.base import GroupedExperts
from dsa_engine.system.output_files import check_outputs

Rounding = Callable[[torch.Tensor], torch.Tensor]


def in_fp8(sums: torch.Tensor) -> torch.Tensor:
    """The numbers that codes and scales of each 128 stand for; scales are powers of two."""
    codes, scales = quantize_rows(sums, 128, True)
    return codes.float() * scales.repeat_interleave(128, dim=-1)[:, : sums.shape[1]]


ROUNDINGS: dict[str, Rounding] = {
    "float32": lambda sums: sums,
    "bfloat16": lambda sums: sums.bfloat16().float(),
    "FP8": in_fp8,
}


def parse() -> argparse.Namespace:
    parser = argument_parser(__doc__)
    parser.add_argument("--texts", type=int, default=8, help="held-out texts")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a text")
    add_json_argument(parser)
    args = parser.parse_args()
    if args.texts < 1 or args.length < 2:
        raise ValueError(f"--texts must be at least 1 and --length at least 2, not {args.texts} and {args.length}")
    return args


def logits_with(llm: LLM, ids: list[int], rounding: Rounding) -> torch.Tensor:
    """Logits ``[tokens, vocab]`` in float64."""
    whole = GroupedExperts.__call__

    def in_parts(self: GroupedExperts, received: Received, uncounted_bytes: int) -> torch.Tensor:
        chosen, received = received.local(self.count), received._replace(served=None, first=None)
        parts = (
            whole(self, received._replace(experts=chosen.where(chosen == expert, -1)), uncounted_bytes)
            for expert in range(self.count)
        )
        return torch.stack([rounding(part) for part in parts]).sum(dim=0)

    with patch.object(GroupedExperts, "__call__", in_parts):
        return llm.prompt_logits(ids).double()


def main() -> None:
    args = parse()
    check_outputs(args.json)
    llm = LLM("demo", device="cpu", dtype="float32", quantization="fp8", max_model_len=args.length, progress=False)
    documents = held_out(llm)
    figures = {name: {"error": 0.0, "kl": 0.0, "same_greedy_token": 0.0, "loss": 0.0} for name in ROUNDINGS}
    for number in range(args.texts):
        ids = documents.batch(SEED + number, 1, args.length, plain=1.0, jumps=False).tokens[0].tolist()
        exact = logits_with(llm, ids, ROUNDINGS["float32"])
        wanted, following = exact.log_softmax(dim=-1), torch.tensor(ids[1:])
        for name, rounding in ROUNDINGS.items():
            logits = logits_with(llm, ids, rounding)
            ours = logits.log_softmax(dim=-1)
            each = {
                "error": (logits - exact).norm() / exact.norm(),
                "kl": (wanted.exp() * (wanted - ours)).sum(dim=-1).mean(),
                "same_greedy_token": (logits.argmax(dim=-1) == exact.argmax(dim=-1)).double().mean(),
                "loss": -ours[:-1].gather(1, following[:, None]).mean(),
            }
            for key, value in each.items():
                figures[name][key] += float(value) / args.texts
    if args.json:
        write_json(args.json, run_report(llm, {"texts": args.texts, "length": args.length}, 1) | {"sums": figures})
    rows = [
        (name, f"{f['error']:.1e}", f"{f['kl']:.1e}", f"{f['same_greedy_token']:.2%}", f"{math.exp(f['loss']):.3f}")
        for name, f in figures.items()
    ]
    print(format_table(("sums", "error of logits", "KL", "same greedy token", "perplexity"), rows))


if __name__ == "__main__":
    run(main)
