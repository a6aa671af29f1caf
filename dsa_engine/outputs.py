"""The results of requests: outputs, stream pieces, log-probabilities and metrics."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True)
class SpeculationMetrics:
    """Counts of drafted and accepted tokens, under vLLM's names."""

    num_drafts: int  # steps with drafts
    num_draft_tokens_per_pos: tuple[int, ...]  # drafts checked at the 1st position of a step, the 2nd, …
    num_accepted_tokens_per_pos: tuple[int, ...]

    @property
    def num_draft_tokens(self) -> int:
        return sum(self.num_draft_tokens_per_pos)

    @property
    def num_accepted_tokens(self) -> int:
        return sum(self.num_accepted_tokens_per_pos)

    @property
    def mean_acceptance_length(self) -> float:
        """Mean tokens of a step with drafts, the model's own token included; nan if there was no such step."""
        return 1 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else math.nan

    @property
    def acceptance_rates(self) -> list[float]:
        """The fraction of drafts accepted, by position."""
        pairs = zip(self.num_accepted_tokens_per_pos, self.num_draft_tokens_per_pos, strict=True)
        return [accepted / drafted for accepted, drafted in pairs]

    @classmethod
    def of(cls, counts: Sequence[tuple[int, int]]) -> SpeculationMetrics:
        """``counts``: the number of drafts of each step, and how many of them were accepted."""
        steps = [(drafts, accepted) for drafts, accepted in counts if drafts]
        positions = range(max((drafts for drafts, _ in steps), default=0))
        return cls(
            len(steps),
            tuple(sum(drafts > i for drafts, _ in steps) for i in positions),
            tuple(sum(accepted > i for _, accepted in steps) for i in positions),
        )


@dataclass(frozen=True)
class RequestMetrics:
    """Times of one request in seconds, measured on its rank; the time to first token includes queueing. Which form of
    attention computed it: each row that a step has computed counts, so drafts do, and tokens computed again."""

    ttft_s: float  # from the request to its first token; nan if it failed before
    tpot_s: float | None  # per token after the first; None for a single token
    preemptions: int = 0  # times it lost its cache pages to an older request and was prefilled again
    speculation: SpeculationMetrics | None = None  # None without drafts
    num_cached_tokens: int = 0  # tokens of the prompt whose cache rows an earlier request had computed
    queue_s: float | None = None  # the part of ttft_s before its first pages, which it waited for; None: unknown
    num_mha_tokens: int = 0  # attended to all tokens before them, with keys and values expanded
    num_dense_tokens: int = 0  # … in absorbed form
    num_sparse_tokens: int = 0  # attended to the tokens that the indexer selected


class Logprob(float):
    """The natural logarithm of a token's probability, with the token's rank and text.

    Attributes:
        rank: the number of tokens that are at least as likely; 1 for the most likely one.
        decoded_token: the token's text; None if no text is made.
        bytes: the token's bytes in UTF-8, which may be a part of a character; empty if no text is made.
    """

    __slots__ = ("bytes", "decoded_token", "rank")  # there may be a million of them

    rank: int | None
    decoded_token: str | None
    bytes: bytes

    def __new__(cls, value: float, rank: int | None = None, decoded_token: str | None = None) -> Logprob:
        made = super().__new__(cls, value)
        made.rank, made.decoded_token, made.bytes = rank, decoded_token, b""
        return made

    @property
    def logprob(self) -> float:
        return float(self)

    def __repr__(self) -> str:
        return f"Logprob(logprob={float(self)}, rank={self.rank}, decoded_token={self.decoded_token!r})"


# Token id -> log-probability in the model's own distribution, before SamplingParams change it: the requested number of
# most likely tokens, most likely first, then the sampled token, if it is not among them.
Logprobs = dict[int, Logprob]


@dataclass(frozen=True, eq=False)
class Selection:
    """What the first generated tokens looked at, see ``SamplingParams.selection``: for the query that a token was
    sampled from, the tokens that each layer attended to. That is 8 bytes for each of ``layers · tokens · index_topk``
    entries: 1 MB a token of DeepSeek-V3.2.

    Attributes:
        positions: int32 ``[layers, tokens, index_topk]``, positions in the prompt and then in the output, ascending,
            with −1 after them; all positions of a query that sees at most ``index_topk`` tokens.
        weights: float32 ``[layers, tokens, index_topk]``, the attention's softmax over these positions, on average over
            the heads: a row sums to 1. 0 where the position is −1.
    """

    positions: np.ndarray
    weights: np.ndarray

    @classmethod
    def joined(cls, tokens: Sequence[Selection]) -> Selection:
        """One selection of the tokens of several, in this order."""
        both = ([getattr(one, name) for one in tokens] for name in ("positions", "weights"))
        return cls(*(np.concatenate(arrays, axis=1) for arrays in both))


@dataclass(frozen=True)
class CompletionOutput:
    """One output of a request. ``text`` is "" if the model folder has no tokenizer, and without ``detokenize``."""

    index: int  # 0 … n-1
    text: str
    token_ids: list[int]
    # "stop": an end token or a stop string; "length": max_tokens or max_model_len; "error": it failed
    finish_reason: str
    metrics: RequestMetrics
    stop_reason: int | str | None = None  # the stop token or string that ended the output; None: the model's end tokens
    # the error message; text and tokens are those before the error. Text that is not streamed and has no stop strings
    # is decoded at the end: if that fails, all tokens are here and the text is "".
    error: str | None = None
    logprobs: list[Logprobs] | None = None  # one entry per token; None if not requested
    cumulative_logprob: float | None = None  # sum over the tokens
    selection: Selection | None = None  # None if not requested
    # of chat(): the assistant's message as OpenAI's API has it, with reasoning_content and tool_calls
    message: dict[str, Any] | None = None


@dataclass(frozen=True)
class RequestOutput:
    """The result of one prompt: ``SamplingParams.n`` outputs. Attributes such as ``text`` are the first one's."""

    request_id: str
    prompt: str | None  # its text; None for a prompt of token ids
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    # one entry per token of the prompt, None for the first; None if not requested
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
    def num_cached_tokens(self) -> int:
        return self.metrics.num_cached_tokens

    @property
    def error(self) -> str | None:
        return self.outputs[0].error

    @property
    def logprobs(self) -> list[Logprobs] | None:
        return self.outputs[0].logprobs

    @property
    def cumulative_logprob(self) -> float | None:
        return self.outputs[0].cumulative_logprob

    @property
    def selection(self) -> Selection | None:
        return self.outputs[0].selection

    @property
    def message(self) -> dict[str, Any] | None:
        return self.outputs[0].message


@dataclass(slots=True)  # one is made for every token of every stream
class StreamPiece:
    """The new text and tokens of a streamed request. ``str(piece)`` is the text.

    The texts of all pieces, joined, are the text of the output, and so are the token ids and log-probabilities. What
    the last piece has alone is as in :class:`CompletionOutput`.
    """

    text: str  # can no longer change; "" if all new text may still change, and without a tokenizer
    token_ids: list[int] = field(default_factory=list)  # since the piece before; their text may come with a later one
    finish_reason: str | None = None  # of the last piece, None on all others
    error: str | None = None  # of the last piece, if finish_reason is "error"
    logprobs: list[Logprobs] | None = None  # one entry per new token; None if not requested
    stop_reason: int | str | None = None  # of the last piece
    index: int = 0  # the number of the output in its call, which only a stream of several outputs needs
    metrics: RequestMetrics | None = None  # of the last piece: the request's
    selection: Selection | None = None  # of the last piece

    def __str__(self) -> str:
        return self.text
