"""Prompts as callers give them, and as :mod:`dsa_engine.engine.calls.async_calls` takes them."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from typing import Any, NamedTuple, TypedDict

from dsa_engine.config.checks import is_integer, shown


class TextPrompt(TypedDict, total=False):
    """A prompt as a dictionary, under vLLM's name; a plain text does as well."""

    prompt: str
    cache_salt: str | None


class TokensPrompt(TextPrompt, total=False):
    """The same of token ids: ``TokensPrompt(prompt_token_ids=[1, 2, 3])``."""

    prompt_token_ids: Seq[int]


# A text; token ids (a list, or an integer array of NumPy or PyTorch); {"prompt": text} or {"prompt_token_ids": ids}.
Prompt = str | Seq[int] | Mapping[str, Any]


class ParsedPrompt(NamedTuple):
    """A prompt's text or its token ids; beside token ids, the text is only reported. Requests with different cache
    salts share no cached pages."""

    text: str | None
    token_ids: list[int] | None
    cache_salt: str | None = None


_FORMS = (
    "a prompt is a text or a list of integer token ids (an integer array, {'prompt': text} and "
    "{'prompt_token_ids': ids} will do)"
)


def parse_prompts(prompts: Any) -> list[ParsedPrompt]:
    """All prompts; a single prompt becomes a list of one."""
    if isinstance(prompts, (str, Mapping)):
        return [_parsed(prompts)]
    prompts = _plain(prompts)
    if not isinstance(prompts, Seq) or isinstance(prompts, bytes) or _is_id(next(iter(prompts), None)):
        return [_parsed(prompts)]
    parsed = []
    for number, prompt in enumerate(prompts):
        with of_many(number, len(prompts)):
            parsed.append(_parsed(prompt))
    return parsed


def either(prompts: Prompt | Seq[Prompt] | None, token_ids: Seq[int] | Seq[Seq[int]] | None) -> Prompt | Seq[Prompt]:
    """The one that is given; raises ``TypeError`` if none or both are."""
    given = [one for one in (prompts, token_ids) if one is not None]
    if len(given) != 1:
        raise TypeError(f"{_FORMS}, not {'both prompts and prompt_token_ids' if given else None}")
    return given[0]


def only_prompt(prompt: Prompt) -> ParsedPrompt:
    """The prompt of a call that takes only one."""
    parsed = parse_prompts([prompt] if isinstance(prompt, (list, tuple)) else prompt)
    if len(parsed) != 1:
        raise TypeError(f"give one prompt, not {len(parsed)}")
    return parsed[0]


@contextmanager
def of_many(number: int, count: int) -> Iterator[None]:
    """Adds to an error the number of the prompt, if there are several."""
    try:
        yield
    except (ValueError, TypeError) as error:
        if count > 1 and error.args and isinstance(error.args[0], str):
            error.args = (f"prompts[{number}]: {error.args[0]}", *error.args[1:])
        raise


def _parsed(prompt: Any) -> ParsedPrompt:
    if isinstance(prompt, str):
        return ParsedPrompt(prompt, None)
    if not isinstance(prompt, Mapping):
        return ParsedPrompt(None, _token_ids(prompt))
    prompt = {key: value for key, value in prompt.items() if value is not None}
    text, ids, salt = prompt.get("prompt"), prompt.get("prompt_token_ids"), prompt.get("cache_salt")
    if prompt.keys() - {"prompt", "prompt_token_ids", "cache_salt"} or (text is None and ids is None):
        raise TypeError(f"{_FORMS}, not a dictionary with the keys {', '.join(map(shown, prompt)) or '(none)'}")
    if text is not None and not isinstance(text, str):
        raise TypeError(f"the prompt in a dictionary must be a text, not {shown(text)}")
    if salt is not None and (not isinstance(salt, str) or not salt):
        raise TypeError(f"cache_salt must be a text that is not empty, not {shown(salt)}")
    return ParsedPrompt(text, None if ids is None else _token_ids(ids), salt)


def _token_ids(given: Any) -> list[int]:
    ids = _plain(given)
    if not isinstance(ids, Seq) or isinstance(ids, (bytes, str)):
        raise TypeError(f"{_FORMS}, not {shown(given)}")
    if all(type(i) is int for i in ids):
        return list(ids)
    if not all(_is_id(i) for i in ids):
        raise TypeError(f"{_FORMS}, not {shown(given)}")
    return [operator.index(i) for i in ids]


def _plain(value: Any) -> Any:
    """The list of an array of NumPy or PyTorch; other values unchanged."""
    return value.tolist() if hasattr(value, "tolist") and hasattr(value, "__array__") else value


def _is_id(value: Any) -> bool:
    """Whether ``value`` is an integer, of NumPy and PyTorch too."""
    if is_integer(value):
        return True
    scalar = _plain(value)
    return scalar is not value and is_integer(scalar)
