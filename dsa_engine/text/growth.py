"""Bounds on the length of the texts between the stages of a tokenizer.

A ``tokenizer.json`` is untrusted. Nine ``Replace`` steps that write ten letters for one take all memory inside the
library, where nothing can end them. So the length of each step's result is bounded before the step runs. A tokenizer
without steps that lengthen a text much, as almost all are, costs nothing more.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from typing import Any

LIMIT = 2**25  # characters of any text between two stages, or _FACTOR times those given, if that is more
_FACTOR = 8
_REPEATS = 16  # how many times as long a pre-tokenizer and a post-processor may make any text
_UNICODE = 18  # characters into which a step of Unicode's normal forms divides one at the most
_UNICODE_STEPS = ("NFC", "NFD", "NFKC", "NFKD", "Lowercase", "BertNormalizer", "Nmt", "ByteLevel")


class Growth:
    """What the stages of one tokenizer may make of a text.

    Args:
        backend: a tokenizer of the library ``tokenizers``.

    Raises:
        ValueError: the pre-tokenizer or the post-processor repeats every text many times.
    """

    def __init__(self, backend: Any):
        self._normalizer, self._decoder = _steps(backend.normalizer), _steps(backend.decoder)
        self._lengthens = any(_lengthens(keys) for keys, _ in self._normalizer)
        self.decodes = any(_lengthens(keys) for keys, _ in self._decoder)
        for stage, factor in (
            ("pre_tokenizer", 2 ** sum(keys["type"] == "ByteLevel" for keys, _ in _steps(backend.pre_tokenizer))),
            ("post_processor", _repeats(backend.post_processor)),
        ):
            if factor > _REPEATS:
                raise ValueError(
                    f"its {stage} makes every text up to {factor:,} times as long; {_REPEATS} times are allowed"
                )

    def check_text(self, text: str) -> None:
        """Raises ``ValueError`` if the normalizer would make the text longer than the limit."""
        if not self._lengthens:
            return
        given = length = len(text)
        limit = max(LIMIT, _FACTOR * given)
        for keys, _ in self._normalizer:
            length = _longest(keys, length)
        if length <= limit:
            return
        for keys, step in self._normalizer:  # the bounds multiply quickly: so each step's own result is measured
            longest = _longest(keys, len(text), text) if _lengthens(keys) else 0
            if longest > limit:
                raise ValueError(_refusal(f"the step {keys['type']} of its normalizer", given, longest, limit))
            text = step.normalize_str(text)
            if len(text) > limit:
                raise ValueError(_refusal(f"the step {keys['type']} of its normalizer", given, len(text), limit))

    def check_tokens(self, tokens: Sequence[str]) -> None:
        """Raises ``ValueError`` if the decoder may make the text of these tokens longer than the limit."""
        given = length = sum(map(len, tokens)) + len(tokens)
        for keys, _ in self._decoder:
            length = _longest(keys, length)
        if length > (limit := max(LIMIT, _FACTOR * given)):
            raise ValueError(_refusal("its decoder", given, length, limit))


def _refusal(stage: str, given: int, longest: int, limit: int) -> str:
    return f"{stage} may make {longest:.2g} characters of {given:,}; at most {limit:,} are allowed"


def _steps(stage: Any) -> list[tuple[dict[str, Any], Any]]:
    """The steps of a stage in order, each with its keys in ``tokenizer.json``; those of a nested sequence too."""
    return [] if stage is None else _flat(json.loads(stage.__getstate__()), stage)


def _flat(keys: dict[str, Any], step: Any) -> list[tuple[dict[str, Any], Any]]:
    if keys["type"] != "Sequence":
        return [(keys, step)]
    inner = next(value for name, value in keys.items() if name != "type")
    reached = hasattr(type(step), "__getitem__")  # the steps of a decoder cannot be had
    return [one for number, key in enumerate(inner) for one in _flat(key, step[number] if reached else None)]


def _pattern(keys: dict[str, Any]) -> str:
    """The text that a ``Replace`` looks for; "" for a regular expression, which may match an empty text."""
    return str(keys["pattern"].get("String", ""))


def _lengthens(keys: dict[str, Any]) -> bool:
    if keys["type"] == "Replace":
        return len(keys["content"]) > len(_pattern(keys))
    return keys["type"] == "Prepend" or (keys["type"] == "Precompiled" and _longest(keys, 1) > _UNICODE * 4)


def _longest(keys: dict[str, Any], length: int, text: str | None = None) -> int:
    """The greatest length of a step's result for a text of ``length`` characters; for this ``text``, if it is given.

    A tokenizer cuts a text at its special tokens and normalizes each part, of which there are at most length + 1.
    """
    kind = keys["type"]
    if kind == "Replace":
        pattern, added = _pattern(keys), len(keys["content"])
        if not pattern:
            return length + (2 * length + 1) * added
        count = length // len(pattern) if text is None else text.count(pattern)
        return length + count * max(0, added - len(pattern))
    if kind == "Prepend":
        return length + (length + 1) * len(keys["prepend"])
    if kind == "Precompiled":
        charsmap = base64.b64decode(keys["precompiled_charsmap"] or "")
        texts = charsmap[4 + int.from_bytes(charsmap[:4], "little") :].split(b"\0")
        return length * max(1, *map(len, texts))
    return length * _UNICODE if kind in _UNICODE_STEPS else length


def _repeats(processor: Any) -> int:
    """How often a post-processor repeats the tokens of a text at the most."""
    product = 1
    for keys, _ in _steps(processor):
        product *= max(1, sum("Sequence" in piece for piece in keys.get("single", ())))
    return product
