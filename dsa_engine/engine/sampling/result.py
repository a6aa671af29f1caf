"""The result of a step: tokens on their way to the host and, with drafts, a table on the device for the next step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from dsa_engine.engine.requests.request import LastRows, Request
from dsa_engine.engine.requests.samples import Ints, ReadSamples, Samples, key_of
from dsa_engine.kernels.runtime.transfer import to_host
from dsa_engine.outputs import Logprob, Logprobs


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
    """The result of a step with drafts, for the requests of all ranks."""

    table: torch.Tensor  # [world · each, width] int64, see Columns
    on_host: Callable[[], torch.Tensor]  # waits for the device and returns the table
    rows: Ints  # [n], row of each request of the samples, in their order
    keys: Ints  # [n], see ``Samples``

    @classmethod
    def of(cls, table: torch.Tensor, samples: Samples, world_size: int) -> Outcome:
        """``table``: the rows of all ranks, as many for each."""
        return cls(table, to_host(table), samples.ranks * (len(table) // world_size) + samples.numbers, samples.keys)

    def rows_of(self, requests: Sequence[Request]) -> list[int]:
        """The row of each of these requests."""
        order = self.keys.argsort()
        at = self.keys[order].searchsorted([key_of(request) for request in requests])
        return self.rows[order[at]].tolist()


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


@dataclass(frozen=True)
class StepResult:
    """The tokens sampled by a step, the same on every rank, on their way to the host.

    Attributes:
        tokens: int64 ``[world · samples.max_rows]`` on the device; negative values are codes of errors.
        codes: waits for the device and returns these.
        logprobs: the same for the rows of ``log_probabilities`` of each; None if no request wants any.
        outcome: the result of drafts; None without them.
        follows: whether the next step may follow before this one is read.
        prompt_logprobs: new ones of requests in prefill, by position.
        last_rows: new ``Request.last_rows`` on this rank.
    """

    samples: Samples
    tokens: torch.Tensor
    codes: Callable[[], torch.Tensor]
    logprobs: Callable[[], torch.Tensor] | None = None
    outcome: Outcome | None = None
    follows: bool = True
    prompt_logprobs: Mapping[Request, Mapping[int, Logprobs]] = field(default_factory=dict)
    last_rows: Mapping[Request, LastRows] = field(default_factory=dict)

    @property
    def can_be_followed(self) -> bool:
        """Whether the next step may be launched before this one is read: it samples, and the host needs none of its
        drafts to plan the next one."""
        return self.follows and self.samples.max_rows > 0

    def read(self) -> ReadSamples:
        """Waits for the device, and returns the tokens of each request."""
        samples, indices = self.samples, self.samples.indices
        logprobs = None if self.logprobs is None else self.logprobs()

        def of_request(request: Request, number: int) -> list[Logprobs]:
            first, asked = int(indices[number]), request.params.logprobs
            assert logprobs is not None and asked is not None
            rows = slice(first, first + int(samples.counts[number]))
            both = zip(self.codes()[rows].tolist(), logprobs[rows].tolist(), strict=True)
            return [ranked(code, row, asked) if code >= 0 else {} for code, row in both]

        of_each = None if logprobs is None else of_request
        if self.outcome is None:
            codes = self.codes().numpy()
            at = indices[:, None] + np.arange(samples.counts.max(initial=1))
            return ReadSamples(samples, codes[at.clip(max=len(codes) - 1)], of_each)
        columns = Columns.of(self.outcome.on_host()[torch.from_numpy(self.outcome.rows)])
        offered, accepted, tokens, drafts = (column.numpy() for column in columns[1:])
        return ReadSamples(samples, tokens, of_each, offered, accepted, drafts)


def ranked(token: int, row: list[float], count: int) -> Logprobs:
    """A row of :func:`.log_probabilities` by token id: the ``count`` most likely tokens, and ``token``."""
    logprob, rank, *best = row
    available = len(best) // 2
    by_token = {int(best[i]): Logprob(best[available + i], i + 1) for i in range(min(count, available))}
    by_token.setdefault(token, Logprob(logprob, int(rank)))
    return by_token
