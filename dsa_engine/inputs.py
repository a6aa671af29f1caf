"""Prompts as callers give them; :mod:`dsa_engine.engine.calls.async_calls` parses them."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any, TypedDict


class TextPrompt(TypedDict, total=False):
    """A prompt as a dictionary, under vLLM's name; a plain text does as well."""

    prompt: str
    cache_salt: str | None


class TokensPrompt(TextPrompt, total=False):
    """The same of token ids: ``TokensPrompt(prompt_token_ids=[1, 2, 3])``."""

    prompt_token_ids: Seq[int]


# A text; token ids (a list, or an integer array of NumPy or PyTorch); {"prompt": text} or {"prompt_token_ids": ids}.
Prompt = str | Seq[int] | Mapping[str, Any]
