"""The options that ``dsa-engine generate`` and ``chat`` have in common."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from dsa_engine.commands.arguments import Rare, json_object
from dsa_engine.config.fields import options_of
from dsa_engine.sampling_params import SamplingParams

_NAMES = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_ELSE: dict[str, Any] = {"max_tokens": 128, "temperature": 0.0}


def add_chat_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--chat-template-kwargs",
        type=_object,
        metavar="JSON",
        help=Rare("variables of the chat template, such as '{\"thinking\": true}' for DeepSeek-V3.2"),
    )


def _object(text: str) -> dict[str, Any]:
    try:
        return json_object(text, "it")
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options; :func:`sampling_params` reads them."""
    for f, _ in options_of(SamplingParams):
        if f.name in _NAMES:
            default = _ELSE.get(f.name, f.default)
            about = f"{f.metadata['doc'].rstrip('.')}; default: that of generation_config.json, else {default}"
            about = about if f.name in _ELSE else Rare(about)
            parser.add_argument(f"--{f.name.replace('_', '-')}", type=type(f.default), help=about)


def sampling_params(args: argparse.Namespace, defaults: Mapping[str, Any] | None = None) -> SamplingParams:
    """The :class:`SamplingParams` that the options describe; ``--seed`` is an option of the engine.

    ``defaults``: those of the model folder (``LLM.default_sampling``); without them the options are checked only.
    """
    given = {name: value for name in _NAMES if (value := getattr(args, name)) is not None}
    return SamplingParams(**(_ELSE | dict(defaults or {}) | given | {"seed": args.seed}))
