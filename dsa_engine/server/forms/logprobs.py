"""Log-probabilities in the forms of the two endpoints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dsa_engine.outputs import Logprob, Logprobs

_LOWEST = -9999.0  # JSON has no infinity


def _number(value: float) -> float:
    return max(float(value), _LOWEST)


def _text(token: int, one: Logprob) -> str:
    return f"token_id:{token}" if one.decoded_token is None else one.decoded_token


def chat_logprobs(tokens: Sequence[int], logprobs: Sequence[Logprobs], top: int) -> dict[str, Any]:
    """The form of chat completions: an entry for each token, with the ``top`` most likely tokens."""

    def entry(token: int, one: Logprob) -> dict[str, Any]:
        text = _text(token, one)
        return {"token": text, "logprob": _number(one), "bytes": list(text.encode("utf-8", "replace"))}

    return {
        "content": [
            entry(token, of_token[token])
            | {"top_logprobs": [entry(other, one) for other, one in list(of_token.items())[:top]]}
            for token, of_token in zip(tokens, logprobs, strict=True)
        ]
    }


def completion_logprobs(
    tokens: Sequence[int], logprobs: Sequence[Logprobs | None], offset: int = 0
) -> tuple[dict[str, Any], int]:
    """The form of completions, for tokens whose text begins at ``offset``; also the offset after them.

    The first token of a prompt has no log-probability.
    """
    form: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for token, of_token in zip(tokens, logprobs, strict=True):
        text = "" if of_token is None else _text(token, of_token[token])
        form["tokens"].append(text)
        form["token_logprobs"].append(None if of_token is None else _number(of_token[token]))
        form["top_logprobs"].append(None if of_token is None else _by_text(of_token))
        form["text_offset"].append(offset)
        offset += len(text)
    return form, offset


def _by_text(logprobs: Logprobs) -> dict[str, float]:
    """Log-probabilities by text; of several tokens with the same text, that of the most likely one."""
    values: dict[str, float] = {}
    for token, one in logprobs.items():
        values.setdefault(_text(token, one), _number(one))
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
