"""What a step computes and samples: for which requests, where its tokens are on their way to the host and, with drafts,
on the device for the next step, and what they are once they are read.

A request is named by its key here, an integer that contains its owner and its id: so a step can be about the requests
of all ranks without a Python object for each.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from dsa_engine.engine.requests.request import Chunk, Ending, LastRows, Request, RequestRecord
from dsa_engine.outputs import Logprob, Logprobs, Selection

if TYPE_CHECKING:  # the HTTP processes, which read messages of tokens, need no PyTorch
    import torch

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

# Codes in place of a token, for errors in the sampling of one request.
NOT_FINITE, NOTHING_LEFT = -1, -2
SAMPLING_ERRORS = {
    NOT_FINITE: "the model's logits for its next token are not finite (inf or nan)",
    NOTHING_LEFT: "no token is left to sample: allowed_token_ids, bad_words, logit_bias, and min_tokens with its "
    "stop_token_ids, forbid every one, or those that structured_outputs allows",
}


_ID_BITS = 40
ID_MASK = (1 << _ID_BITS) - 1  # the id in a key


def key_of(request: Request) -> int:
    """The key of a request that has an owner; keys are in the order of owners, then of arrival."""
    return (request.owner << _ID_BITS) + request.id


class Samples(NamedTuple):
    """The rows with logits of a step, for n requests of all ranks; a request's rows are consecutive on one rank."""

    keys: Ints  # [n]
    ranks: Ints  # [n], the rank of each request's rows, in ascending order
    numbers: Ints  # [n], number of the request among those of that rank
    first: Ints  # [n], index of its first row among the rows with logits of that rank
    counts: Ints  # [n], number of its rows
    max_rows: int  # maximum number of rows with logits of a rank; 0: the step samples nothing
    max_logprobs: int = -1  # maximum number of log-probabilities that a request wants; -1: none wants any

    @classmethod
    def of(cls, requests: Sequence[Request], ranks: npt.ArrayLike, counts: npt.ArrayLike, world_size: int) -> Samples:
        """By rank, and in the order of the rows."""
        keys, of_each, rows = (np.asarray(of, np.int64) for of in ([*map(key_of, requests)], ranks, counts))
        wanted = [r.params.logprobs for r in requests if r.params.logprobs is not None]
        return cls.by_rank(keys, of_each, rows, world_size, max(wanted, default=-1))

    @classmethod
    def by_rank(cls, keys: Ints, ranks: Ints, counts: Ints, world_size: int, max_logprobs: int) -> Samples:
        of_rank = ranks.searchsorted(np.arange(world_size + 1))  # the first request of each rank
        before = np.concatenate(([0], counts.cumsum()))  # rows before each request's
        numbers, first = np.arange(len(keys)) - of_rank[ranks], before[:-1] - before[of_rank[ranks]]
        return cls(keys, ranks, numbers, first, counts, int(np.diff(before[of_rank]).max(initial=0)), max_logprobs)

    @property
    def indices(self) -> Ints:
        """int64 ``[n]``: index of each request's first token among those of all ranks, ``max_rows`` for each."""
        return self.ranks * self.max_rows + self.first

    @property
    def max_requests(self) -> int:
        """Number of requests of the rank with the most."""
        return int(self.numbers.max(initial=-1)) + 1

    def rows_of(self, ranks: Sequence[int]) -> int:
        """Maximum number of rows with logits of these ranks."""
        return max(int(self.counts[self.of_rank(rank)].sum()) for rank in ranks)

    def of_rank(self, rank: int) -> slice:
        """The requests whose rows are on this rank."""
        return slice(*self.ranks.searchsorted((rank, rank + 1)).tolist())

    def of_ranks(self, ranks: range) -> slice:
        """The requests whose rows are on these neighbouring ranks."""
        return slice(*self.ranks.searchsorted((ranks.start, ranks.stop)).tolist())


class DecodeStep(NamedTuple):
    """The next tokens of n requests that decode; the arrays are about the requests of all ranks, by key."""

    chunks: list[Chunk]  # those of the ranks that hold pages with this one, by owner and arrival
    samples: Samples  # every row has logits
    starts: Ints  # [n], position of each request's first row
    asks: int  # what any request asks of the sampler, see ``SamplingParams.asks``
    top_k: int  # the largest ``num_best`` of a request
    least_context: int = 0  # tokens of a request that lies evenly and has as many pages on a rank as any of these


class DraftResult(NamedTuple):
    """Numbers of a request's drafts in a step."""

    offered: int  # verified
    accepted: int


class RequestTokens(NamedTuple):
    """The new tokens of one request, in order of position; with drafts, the accepted ones and one more. The last may be
    the code of an error."""

    request: Request
    tokens: list[int]
    draft_result: DraftResult | None = None  # None without drafts
    logprobs: Floats | None = None  # [tokens, width], see ``StepTokens``


class Ended(NamedTuple):
    """A request that has ended, with the tokens that its caller does not have."""

    id: int
    tokens: list[int]
    ending: Ending
    record: RequestRecord
    logprobs: Floats | None = None  # [tokens, width], see ``StepTokens``


class StepTokens(NamedTuple):
    """What callers on a rank get of a step: the tokens of n requests that go on, up to m each, and the requests that
    have ended with it."""

    at: float  # time when they were read, by time.perf_counter
    ids: Ints  # [n]
    counts: Ints  # [n], number of tokens of each
    tokens: Ints  # [n, m]
    logprobs: Floats | None  # [n, m, width], see ``log_probabilities``; None: these requests want none
    ended: list[Ended]

    def of(self, numbers: Sequence[int], ended: list[Ended]) -> StepTokens:
        """The part with these of the n requests, and with these that have ended."""
        if len(numbers) == len(self.ids):
            return self._replace(ended=ended)
        at = np.array(numbers, np.int64)
        logprobs = None if self.logprobs is None else self.logprobs[at]
        return StepTokens(self.at, self.ids[at], self.counts[at], self.tokens[at], logprobs, ended)

    @classmethod
    def only(cls, ended: list[Ended]) -> StepTokens:
        none = np.empty(0, np.int64)
        return cls(time.perf_counter(), none, none, none.reshape(0, 1), None, ended)


@dataclass(frozen=True)
class ReadSamples:
    """The tokens of a step on the host, for n requests with up to m tokens each."""

    samples: Samples
    tokens: Ints  # [n, m], negative values are codes of errors
    logprobs: Floats | None = None  # [rows of all ranks, width], see ``log_probabilities``; None if none are wanted
    offered: Ints | None = None  # [n], number of drafts that were verified; this and the next two: None without drafts
    accepted: Ints | None = None  # [n]
    drafts: Ints | None = None  # [n, m - 1], drafts of the tokens after these
    num_drafts: int | None = None  # made in a decode step; None: it has prefilled

    def logprobs_of(self, numbers: Ints) -> Floats:
        """Float64 ``[len(numbers), m, width]``: those of the tokens of these of the n requests."""
        assert self.logprobs is not None
        rows = self.samples.indices[numbers][:, None] + np.arange(self.tokens.shape[1])
        return self.logprobs[rows.clip(max=len(self.logprobs) - 1)]


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
        import torch

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
        from dsa_engine.kernels.runtime.transfer import to_host

        return cls(table, to_host(table), samples.ranks * (len(table) // world_size) + samples.numbers, samples.keys)

    def rows_of(self, requests: Sequence[Request]) -> list[int]:
        """The row of each of these requests."""
        order = self.keys.argsort()
        at = self.keys[order].searchsorted([key_of(request) for request in requests])
        return self.rows[order[at]].tolist()


@dataclass(frozen=True)
class StepResult:
    """The tokens sampled by a step, the same on every rank, on their way to the host."""

    samples: Samples
    tokens: torch.Tensor  # int64 ``[world · samples.max_rows]`` on the device; negative values are codes of errors
    codes: Callable[[], torch.Tensor]  # waits for the device and returns these
    # The same for the rows of `log_probabilities` of each; None if no request wants any.
    logprobs: Callable[[], torch.Tensor] | None = None
    outcome: Outcome | None = None  # the result of drafts; None without them
    num_drafts: int | None = None  # made by a decode step; None: it has prefilled
    follows: bool = True  # whether the next step may follow before this one is read
    prompt_logprobs: Mapping[Request, Mapping[int, Logprobs]] = field(default_factory=dict)  # new ones, by position
    last_rows: Mapping[Request, LastRows] = field(default_factory=dict)  # new ``Request.last_rows`` on this rank
    selections: Mapping[int, Mapping[int, Selection]] = field(default_factory=dict)  # by request's id; on rank 0

    @property
    def drafted(self) -> int:
        """Number of drafts of each request that the next step finds on the device."""
        return 0 if self.outcome is None else self.outcome.table.shape[1] // 2 - 2

    @property
    def can_be_followed(self) -> bool:
        """Whether the next step may be launched before this one is read."""
        return self.follows and self.samples.max_rows > 0

    def read(self) -> ReadSamples:
        """Waits for the device."""
        samples, indices = self.samples, self.samples.indices
        logprobs = None if self.logprobs is None else self.logprobs().numpy()
        if self.outcome is None:
            codes = self.codes().numpy()
            at = indices[:, None] + np.arange(samples.counts.max(initial=1))
            return ReadSamples(samples, codes[at.clip(max=len(codes) - 1)], logprobs, num_drafts=self.num_drafts)
        columns = Columns.of(self.outcome.on_host()[self.outcome.rows])
        offered, accepted, tokens, drafts = (column.numpy() for column in columns[1:])
        return ReadSamples(samples, tokens, logprobs, offered, accepted, drafts, self.num_drafts)


def ranked(token: int, row: Sequence[float], count: int) -> Logprobs:
    """A row of :func:`.log_probabilities` by token id: the ``count`` most likely tokens, and ``token``."""
    logprob, rank, *best = row
    available = len(best) // 2
    by_token = {int(best[i]): Logprob(best[available + i], i + 1) for i in range(min(count, available))}
    by_token.setdefault(token, Logprob(logprob, int(rank)))
    return by_token
