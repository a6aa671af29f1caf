"""What a user gets back."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class RequestMetrics:
    """Times of one request, in seconds, as its rank saw them; queueing is part of the time to first token."""

    ttft_s: float  # from the request to its first token
    tpot_s: float | None  # per token after the first; None where there is only one

    @classmethod
    def of(cls, arrival: float, first: float, last: float, tokens: int) -> RequestMetrics:
        return cls(first - arrival, (last - first) / (tokens - 1) if tokens > 1 else None)


@dataclass(frozen=True)
class RequestOutput:
    """One finished request. ``text`` is "" where the model folder has no tokenizer."""

    text: str
    token_ids: list[int]
    prompt_token_ids: list[int]
    finish_reason: str  # "stop": an end token or a stop string; "length": max_tokens or max_model_len
    metrics: RequestMetrics


@dataclass(frozen=True)
class StreamPiece:
    """A step of a streamed request: the text and the tokens that are new. ``str(piece)`` is the text."""

    text: str
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None  # set on the last piece

    def __str__(self) -> str:
        return self.text
