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


class Logprob(float):
    """The natural logarithm of a token's probability, and what is known of the token.

    Attributes:
        rank: how many tokens are at least as likely, 1 for the most likely one.
        decoded_token: the token's text; None where no text is made.
    """

    rank: int | None
    decoded_token: str | None

    def __new__(cls, value: float, rank: int | None = None, decoded_token: str | None = None) -> Logprob:
        made = super().__new__(cls, value)
        made.rank, made.decoded_token = rank, decoded_token
        return made

    @property
    def logprob(self) -> float:
        return float(self)

    def __repr__(self) -> str:
        return f"Logprob(logprob={float(self)}, rank={self.rank}, decoded_token={self.decoded_token!r})"


# Token id -> log-probability in the model's own distribution, before all that SamplingParams change in it: the most
# likely tokens that were asked for, most likely first, and the token that came, if it is none of them.
Logprobs = dict[int, Logprob]


@dataclass(frozen=True)
class CompletionOutput:
    """One output of a request. ``text`` is "" where the model folder has no tokenizer, and without ``detokenize``."""

    index: int  # 0 … n-1
    text: str
    token_ids: list[int]
    # "stop": an end token or a stop string; "length": max_tokens or max_model_len; "error": it failed
    finish_reason: str
    metrics: RequestMetrics
    stop_reason: int | str | None = None  # the stop token or string; None for the model's own end tokens, and otherwise
    error: str | None = None  # what went wrong; text and tokens are those from before
    logprobs: list[Logprobs] | None = None  # of each token; None where they were not asked for
    cumulative_logprob: float | None = None  # sum over the tokens


@dataclass(frozen=True)
class RequestOutput:
    """What came of one prompt: ``SamplingParams.n`` outputs. What is asked of it directly, such as ``text``, is that of
    the first one."""

    request_id: str
    prompt: str | None  # its text; None where it was given as token ids
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    # of each token of the prompt, None for the first; None where they were not asked for
    prompt_logprobs: list[Logprobs | None] | None = None
    finished: bool = True

    @property
    def text(self) -> str:
        return self.outputs[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> str:
        return self.outputs[0].finish_reason

    @property
    def metrics(self) -> RequestMetrics:
        return self.outputs[0].metrics

    @property
    def error(self) -> str | None:
        return self.outputs[0].error

    @property
    def logprobs(self) -> list[Logprobs] | None:
        return self.outputs[0].logprobs

    @property
    def cumulative_logprob(self) -> float | None:
        return self.outputs[0].cumulative_logprob


@dataclass(frozen=True)
class StreamPiece:
    """A step of a streamed request: the text and the tokens that are new. ``str(piece)`` is the text."""

    text: str
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None  # set on the last piece
    error: str | None = None  # set with finish_reason "error"
    logprobs: list[Logprobs] | None = None  # of the new tokens, as in CompletionOutput
    stop_reason: int | str | None = None  # as in CompletionOutput

    def __str__(self) -> str:
        return self.text
