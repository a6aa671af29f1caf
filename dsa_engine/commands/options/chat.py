"""The options of conversations, for ``dsa-engine chat`` and ``dsa-engine generate --chat``."""

from __future__ import annotations

import argparse
import json
from typing import Any


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
