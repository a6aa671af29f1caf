"""The sampling options of ``dsa-engine generate`` and ``chat``."""

from __future__ import annotations

import argparse

from dsa_engine.sampling_params import SamplingParams


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options; :func:`sampling_params` reads them."""
    parser.add_argument("--max-tokens", type=int, default=128, help="most tokens to generate")
    parser.add_argument("--temperature", type=float, default=0.0, help="0: the most likely token")
    parser.add_argument(
        "--top-p", type=float, default=1.0, help="keep the likeliest tokens of this probability together"
    )
    parser.add_argument("--top-k", type=int, default=0, help="keep this many of the likeliest tokens; 0: all")
    parser.add_argument(
        "--min-p", type=float, default=0.0, help="keep tokens of at least this fraction of the highest probability"
    )


def sampling_params(args: argparse.Namespace) -> SamplingParams:
    """The :class:`SamplingParams` that the options describe; ``--seed`` is an option of the engine."""
    return SamplingParams(
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        min_p=args.min_p,
        max_tokens=args.max_tokens,
        seed=args.seed,
    )
