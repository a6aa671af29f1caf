"""What a user gets back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class SpeculationMetrics:
    """What became of drafts; the counts have vLLM's names."""

    num_drafts: int  # steps that verified some
    num_draft_tokens_per_pos: tuple[int, ...]  # drafts verified, of the first token behind a known one, the second, …
    num_accepted_tokens_per_pos: tuple[int, ...]

    @property
    def num_draft_tokens(self) -> int:
        return sum(self.num_draft_tokens_per_pos)

    @property
    def num_accepted_tokens(self) -> int:
        return sum(self.num_accepted_tokens_per_pos)

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens that a step with drafts brought, its own included; nan where there was none."""
        return 1 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else math.nan

    @property
    def acceptance_rates(self) -> list[float]:
        """Of the drafts of each position, the fraction that was accepted."""
        pairs = zip(self.num_accepted_tokens_per_pos, self.num_draft_tokens_per_pos, strict=True)
        return [accepted / drafted for accepted, drafted in pairs]

    @classmethod
    def of(cls, verified: Sequence[tuple[int, int]]) -> SpeculationMetrics:
        """``verified``: of each step, how many drafts there were and how many of them were accepted."""
        steps = [(drafts, accepted) for drafts, accepted in verified if drafts]
        positions = range(max((drafts for drafts, _ in steps), default=0))
        return cls(
            len(steps),
            tuple(sum(drafts > i for drafts, _ in steps) for i in positions),
            tuple(sum(accepted > i for _, accepted in steps) for i in positions),
        )


@dataclass(frozen=True)
class RequestMetrics:
    """Times of one request, in seconds, as its rank saw them; queueing is part of the time to first token."""

    ttft_s: float  # from the request to its first token; nan where an error left it without one
    tpot_s: float | None  # per token after the first; None where there is only one
    preemptions: int = 0  # times that it lost its cache pages to an older request and was prefilled again
    speculation: SpeculationMetrics | None = None  # None where no drafts were verified

    @classmethod
    def of(
        cls,
        arrival: float,
        first: float | None,
        last: float | None,
        tokens: int,
        preemptions: int,
        speculation: SpeculationMetrics | None = None,
    ) -> RequestMetrics:
        if first is None or last is None:
            return cls(math.nan, None, preemptions, speculation)
        tpot = (last - first) / (tokens - 1) if tokens > 1 else None
        return cls(first - arrival, tpot, preemptions, speculation)


@dataclass(frozen=True)
class RequestOutput:
    """One finished request. ``text`` is "" where the model folder has no tokenizer.

    ``logprobs`` has a dictionary for each output token: token id -> natural logarithm of its probability in the model's
    own distribution, before temperature, top-k, top-p, min-p and forbidden tokens. In it are the
    ``SamplingParams.logprobs`` most likely tokens and the sampled one, most likely first.
    """

    text: str
    token_ids: list[int]
    prompt_token_ids: list[int]
    # "stop": an end token or a stop string; "length": max_tokens or max_model_len; "error": this request failed
    finish_reason: str
    metrics: RequestMetrics
    error: str | None = None  # what went wrong; text and tokens are those from before
    logprobs: list[dict[int, float]] | None = None  # None where they were not asked for
    cumulative_logprob: float | None = None  # sum over the output tokens


@dataclass(frozen=True)
class StreamPiece:
    """A step of a streamed request: the text and the tokens that are new. ``str(piece)`` is the text."""

    text: str
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None  # set on the last piece
    error: str | None = None  # set with finish_reason "error"
    logprobs: list[dict[int, float]] | None = None  # of the new tokens, as in RequestOutput

    def __str__(self) -> str:
        return self.text
