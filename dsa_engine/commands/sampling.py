"""The options that ``dsa-engine generate`` and ``chat`` have in common."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from typing import Any

from dsa_engine.sampling_params import SamplingParams

_NAMES = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_ELSE: dict[str, Any] = {"max_tokens": 128, "temperature": 0.0}


def add_chat_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--chat-template-kwargs",
        type=_object,
        metavar="JSON",
        help="variables of the chat template, such as '{\"thinking\": true}' for DeepSeek-V3.2",
    )


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"give a JSON object, not {text!r}: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"give a JSON object, not {text!r}")
    return value


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options; :func:`sampling_params` reads them."""
    source = "default: that of generation_config.json, else"
    parser.add_argument("--max-tokens", type=int, help=f"maximum number of tokens to generate; {source} 128")
    parser.add_argument("--temperature", type=float, help=f"0: the most likely token; {source} 0")
    parser.add_argument(
        "--top-p", type=float, help=f"keep the likeliest tokens up to this total probability; {source} 1"
    )
    parser.add_argument("--top-k", type=int, help=f"keep this many of the likeliest tokens, 0: all; {source} 0")
    parser.add_argument(
        "--min-p", type=float, help=f"keep tokens of at least this fraction of the highest probability; {source} 0"
    )
    parser.add_argument(
        "--repetition-penalty", type=float, help=f"above 1: tokens of the text so far become less likely; {source} 1"
    )


def sampling_params(args: argparse.Namespace, defaults: Mapping[str, Any] | None = None) -> SamplingParams:
    """The :class:`SamplingParams` that the options describe; ``--seed`` is an option of the engine.

    Args:
        defaults: defaults of the model folder (``LLM.default_sampling``); without them the options are checked only.

    Raises:
        ValueError: an option is not possible.
    """
    given = {name: value for name in _NAMES if (value := getattr(args, name)) is not None}
    return SamplingParams(**(_ELSE | dict(defaults or {}) | given | {"seed": args.seed}))
