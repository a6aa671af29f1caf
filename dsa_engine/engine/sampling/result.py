"""The result of a step: tokens on their way to the host and, with drafts, a table on the device for the next step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from dsa_engine.engine.requests.request import LastRows, Request, SampledToken
from dsa_engine.engine.sampling.draw import ranked
from dsa_engine.outputs import Logprobs

FIRST_TOKEN = 3  # column of a table where the tokens begin, see Columns


class DraftResult(NamedTuple):
    """The result of a request's drafts in a step."""

    offered: int  # number of drafts that were verified
    accepted: int  # number of drafts that were accepted
    drafts: list[int]  # new drafts, of the next tokens


class Columns(NamedTuple):
    """The columns of a table of n requests with up to ``count`` drafts each; int64."""

    position: torch.Tensor  # [n], position of the last token, where the next step starts
    offered: torch.Tensor  # [n], number of drafts that were verified
    accepted: torch.Tensor  # [n]
    tokens: torch.Tensor  # [n, 1 + count]: accepted drafts and the token after them, or codes of errors; then void
    drafts: torch.Tensor  # [n, count], new drafts, of the tokens after these

    @classmethod
    def of(cls, table: torch.Tensor) -> Columns:
        """Views of ``table [n, width]``."""
        count = table.shape[1] // 2 - 2
        position, offered, accepted, tokens, drafts = table.split((1, 1, 1, 1 + count, count), dim=1)
        return cls(position[:, 0], offered[:, 0], accepted[:, 0], tokens, drafts)

    @staticmethod
    def width(count: int) -> int:
        """Number of columns for up to ``count`` drafts."""
        return 4 + 2 * count

    @property
    def last_token(self) -> torch.Tensor:
        """int64 ``[n, 1]``: the token at ``position``."""
        return self.tokens.gather(1, self.accepted[:, None])

    def table(self) -> torch.Tensor:
        """int64 ``[n, width]``."""
        numbers = torch.stack((self.position, self.offered, self.accepted), dim=1)
        return torch.cat((numbers, self.tokens, self.drafts), dim=1)


class Outcome(NamedTuple):
    """The result of a step for the requests of all ranks."""

    table: torch.Tensor  # [n, width] int64, see Columns
    rows: Mapping[Request, int]  # each request's row of the table

    def read(self, download: Callable[[], list[Any]]) -> list[DraftResult]:
        """The result of each request, once all earlier steps have been read; ``download`` returns the table."""
        table, results = download(), []
        for request, row in self.rows.items():
            _, offered, accepted, *others = table[row]
            count, remaining = len(others) // 2, request.max_tokens - len(request.output) - accepted - 1
            # A request's last token is never drafted: no step would be saved.
            results.append(DraftResult(offered, accepted, others[1 + count :][: max(0, remaining - 1)]))
        return results


# Codes in place of a token, for errors in the sampling of one request.
NOT_FINITE, NOTHING_LEFT = -1, -2
_ERRORS = {
    NOT_FINITE: "the model's logits for its next token are not finite (inf or nan)",
    NOTHING_LEFT: "no token is left to sample: allowed_token_ids, bad_words, logit_bias, and min_tokens with its "
    "stop_token_ids, forbid every one",
}


def check_finite(logits: torch.Tensor) -> torch.Tensor:
    """Returns ``logits [vocab]`` or ``[len, vocab]`` on the host.

    Raises:
        ValueError: they are not finite; the text has the first position.
    """
    # The sum reads them once. Only if it is not finite (it may overflow), each is checked.
    if not bool(logits.sum().isfinite()) and not bool((finite := logits.isfinite().all(dim=-1)).all()):
        where = "after the prompt" if logits.dim() == 1 else f"at position {int((~finite).nonzero()[0])} of the prompt"
        raise ValueError(f"the model's logits {where} are not finite (inf or nan)")
    return logits


class RequestTokens(NamedTuple):
    """The new tokens of one request from a step, in order of position; with drafts, the accepted ones and one more."""

    request: Request
    tokens: list[SampledToken]
    draft_result: DraftResult | None = None  # None without drafts


@dataclass(frozen=True)
class StepResult:
    """The tokens sampled by a step, the same on every rank, on their way to the host."""

    indices: dict[Request, range]  # indices of each request's tokens in ``tokens``
    tokens: torch.Tensor  # int64 [n] on the device; negative values are codes of errors
    _codes: Callable[[], list[Any]]
    _logprobs: Callable[[], list[Any]] | None
    prompt_logprobs: Mapping[Request, Mapping[int, Logprobs]] = field(default_factory=dict)  # by position
    draft_results: Callable[[], list[DraftResult]] | None = None  # one for each request; None without drafts
    outcome: Outcome | None = None  # lets the next step follow before this one is read
    last_rows: Mapping[Request, LastRows] = field(default_factory=dict)  # new ``Request.last_rows`` on this rank

    def read(self) -> list[RequestTokens]:
        """Waits for the device, and returns the tokens of each request."""
        codes = self._codes()
        logprobs = self._logprobs() if self._logprobs else [None] * len(codes)
        sampled = [
            RequestTokens(request, [_sampled(codes[i], logprobs[i], request.params.logprobs) for i in indices])
            for request, indices in self.indices.items()
        ]
        if self.draft_results is None:
            return sampled
        return [
            RequestTokens(one.request, one.tokens[: result.accepted + 1], result)
            for one, result in zip(sampled, self.draft_results(), strict=True)
        ]


def _sampled(code: int, logprobs: list[float] | None, asked: int | None) -> SampledToken:
    if code < 0:
        return SampledToken(code, error=_ERRORS[code])
    return SampledToken(code, None if asked is None or logprobs is None else ranked(code, logprobs, asked))
