"""Counts of tokens, in OpenAI's form."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from dsa_engine.outputs import CompletionOutput, RequestOutput, StreamPiece


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


def usage_of(outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    """The usage of whole outputs. A prompt counts once, however many outputs it has."""
    return usage(
        sum(len(one.prompt_token_ids) for one in outputs),
        sum(len(output.token_ids) for one in outputs for output in one.outputs),
        sum(one.metrics.num_cached_tokens for one in outputs),
    )


class StreamUsage:
    """The usage of a stream so far.

    Args:
        prompts: token ids of each prompt.
        n: number of outputs of a prompt.
    """

    def __init__(self, prompts: Iterable[Sequence[int]], n: int):
        self._prompt_tokens = sum(map(len, prompts))
        self._n = n
        self._output_tokens = self._cached = 0

    def add(self, piece: StreamPiece) -> None:
        self._output_tokens += len(piece.token_ids)
        if piece.metrics is not None and piece.index % self._n == 0:
            self._cached += piece.metrics.num_cached_tokens

    @property
    def form(self) -> dict[str, Any]:
        return usage(self._prompt_tokens, self._output_tokens, self._cached)


def failure_of(outputs: Iterable[CompletionOutput | StreamPiece]) -> str | None:
    """The error message of the first output that has failed."""
    return next((one.error or "no reason given" for one in outputs if one.finish_reason == "error"), None)
