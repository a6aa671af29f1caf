"""Parts of answers: log-probabilities in the forms of the two endpoints, and counts of tokens."""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from dsa_engine.outputs import CompletionOutput, Logprob, Logprobs, Selection, StreamPiece

_LOWEST = -9999.0  # JSON has no infinity


def _number(value: float) -> float:
    return max(float(value), _LOWEST)


def _text(token: int, one: Logprob, as_id: bool = False) -> str:
    return f"token_id:{token}" if as_id or one.decoded_token is None else one.decoded_token


def _bytes(token: int, one: Logprob) -> bytes:
    return one.bytes or _text(token, one).encode("utf-8", "replace")


def chat_logprobs(
    tokens: Sequence[int], logprobs: Sequence[Logprobs], top: int, as_ids: bool = False
) -> dict[str, Any]:
    """The form of chat completions: an entry for each token, with the ``top`` most likely tokens. ``as_ids``: tokens
    are "token_id:123", which tells those with the same text apart."""

    def entry(token: int, one: Logprob) -> dict[str, Any]:
        return {"token": _text(token, one, as_ids), "logprob": _number(one), "bytes": list(_bytes(token, one))}

    return {
        "content": [
            entry(token, of_token[token])
            | {"top_logprobs": [entry(other, one) for other, one in list(of_token.items())[:top]]}
            for token, of_token in zip(tokens, logprobs, strict=True)
        ]
    }


class TextOffsets:
    """The length of a text that grows by tokens. A character of several tokens is the text of its last one."""

    def __init__(self) -> None:
        self.length, self._decoder = 0, getincrementaldecoder("utf-8")("replace")

    def add(self, token: bytes) -> str:
        """What a token of these bytes adds to the text."""
        new = self._decoder.decode(token)
        self.length += len(new)
        return new


def completion_logprobs(
    tokens: Sequence[int], logprobs: Sequence[Logprobs | None], offsets: TextOffsets, as_ids: bool
) -> dict[str, Any]:
    """The form of completions, for the tokens that follow those of ``offsets``: their texts, joined, are the text,
    unless they are ``as_ids``. The first token of a prompt has no log-probability.
    """
    form: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for token, of_token in zip(tokens, logprobs, strict=True):
        begins = offsets.length
        text = "" if of_token is None else offsets.add(_bytes(token, of_token[token]))
        form["tokens"].append(f"token_id:{token}" if as_ids else text)
        form["token_logprobs"].append(None if of_token is None else _number(of_token[token]))
        form["top_logprobs"].append(None if of_token is None else _by_text(of_token, as_ids))
        form["text_offset"].append(begins)
    return form


def _by_text(logprobs: Logprobs, as_ids: bool) -> dict[str, float]:
    """Log-probabilities by text; of several tokens with the same text, that of the most likely one."""
    values: dict[str, float] = {}
    for token, one in logprobs.items():
        values.setdefault(_text(token, one, as_ids), _number(one))
    return values


def prompt_logprobs(logprobs: Sequence[Logprobs | None]) -> list[dict[str, Any] | None]:
    """vLLM's form of a prompt's log-probabilities."""
    return [
        None
        if of_token is None
        else {
            str(token): {"logprob": _number(one), "rank": one.rank, "decoded_token": one.decoded_token}
            for token, one in of_token.items()
        }
        for of_token in logprobs
    ]


def selection_of(selection: Selection | None) -> dict[str, Any]:
    """The field ``selection`` of a choice, if it was requested: by layer and token, lists of positions and of weights,
    these rounded to a millionth."""
    if selection is None:
        return {}
    both = {"positions": selection.positions, "weights": selection.weights.round(6)}

    def lists(of: np.ndarray) -> list[list[list[Any]]]:
        return [[row[at >= 0].tolist() for row, at in zip(*rows)] for rows in zip(of, selection.positions)]

    return {"selection": {name: lists(of) for name, of in both.items()}}


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


class Usage:
    """The usage of outputs so far. A prompt counts once, however many outputs (``n``) it has."""

    def __init__(self, prompts: Sequence[Sequence[int]], n: int):
        self._prompt_tokens = sum(map(len, prompts))
        self._n = n
        self._cached = 0
        self.output_tokens = [0] * (len(prompts) * n)

    def add(self, index: int, output: CompletionOutput | StreamPiece) -> None:
        """Adds all of output ``index`` of all prompts, or a piece of it."""
        self.output_tokens[index] += len(output.token_ids)
        if output.metrics is not None and index % self._n == 0:
            self._cached += output.metrics.num_cached_tokens

    @property
    def form(self) -> dict[str, Any]:
        return usage(self._prompt_tokens, sum(self.output_tokens), self._cached)


def failure_of(outputs: Iterable[CompletionOutput | StreamPiece]) -> str | None:
    """The error message of the first output that has failed."""
    return next((one.error or "no reason given" for one in outputs if one.finish_reason == "error"), None)
