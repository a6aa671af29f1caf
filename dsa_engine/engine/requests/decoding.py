"""The requests that decode, of all ranks, as arrays: what a step changes in all of them is changed at once.

Every rank has the same rows in the same order, by owner and then by arrival, and so takes the same decisions. Python
objects are touched every step only for what this rank owns; those of other requests when they come, have their first
token, end, are preempted or fill a page. Until then their tokens stay in an array, and callers get them from there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dsa_engine.engine.cache.ledger import PageLedger
from dsa_engine.engine.requests.draft_number import DraftNumber
from dsa_engine.engine.requests.limits import Capacity
from dsa_engine.engine.requests.request import Chunk, Request
from dsa_engine.engine.requests.samples import (
    ID_MASK,
    NOT_FINITE,
    NOTHING_LEFT,
    DecodeStep,
    DraftResult,
    Ints,
    ReadSamples,
    RequestTokens,
    Samples,
    StepTokens,
    key_of,
)
from dsa_engine.sampling_params import NEEDS_HOST, RECORDS

_ALL = slice(None)
_BUFFERED = 256  # tokens of a request in the array; when it is full, they go to the request


class Table(NamedTuple):
    """The columns of n requests, ``[n]`` each."""

    key: Ints  # see ``samples.key_of``
    owner: Ints
    length: Ints  # tokens, with those that are not read
    limit: Ints  # maximum number of tokens
    expected: Ints  # number of tokens that it will probably have
    least: Ints  # number of tokens from which it may end by a token
    recorded: Ints  # number of tokens up to which selections are recorded
    pages: Ints  # held in the owner's pool
    even_pages: Ints  # see :func:`.ledger.even_pages`
    unread: Ints  # tokens that have been sampled and not read
    unverified: Ints  # unread tokens that turn out to be none if drafts are not accepted
    drafts: Ints  # drafts of the next tokens that the host knows
    asks: Ints  # of the sampler, see ``chain.Inputs``; so the next two
    top_k: Ints
    logprobs: Ints
    direct: Ints  # whether its object gets its tokens as they are read
    streamed: Ints  # whether its caller does
    fresh: Ints  # whether it has had no token yet
    slot: Ints  # where they are buffered if not


class Decoding:
    """A table with a row for every request that decodes. While a request is here, the table knows its length and its
    number of pages; only this rank's requests and those ``tracked`` have a current ``output``."""

    def __init__(
        self,
        rank: int,
        capacity: Capacity,
        eos_token_ids: Collection[int] = (),
        draft_number: DraftNumber | None = None,
    ):
        self._rank, self._world, self._page_size = rank, capacity.world_size, capacity.page_size
        first = rank - rank % capacity.dcp_size
        self._holders = range(first, first + capacity.dcp_size)  # of pages together with this rank
        self._alone = {one: range(one, one + 1) for one in self._holders}
        self.draft_number = draft_number or DraftNumber([0])
        self._eos_token_ids, self._num_drafts = eos_token_ids, self.draft_number.choices[-1]
        self._planned = 0  # number of drafts of the step planned last
        self._made = 0  # maximum of ``table.drafts``
        self._set_ends(eos_token_ids)
        self.requests: list[Request] = []  # of each row
        self._cells = np.empty((len(Table._fields), 0), np.int64)  # [columns, requests]
        # Rows computed as MHA, dense and sparse, of which its object does not know.
        self._by_form = np.empty((3, 0), np.int64)  # [forms, requests]
        # Each has a row for every slot.
        self._tokens = np.empty((0, _BUFFERED + (num_drafts := self._num_drafts)), np.int64)
        self._buffered = np.empty(0, np.int64)  # number of tokens in each
        self._accepted = np.empty((0, num_drafts + 1, num_drafts + 1), np.int64)  # [slot, offered, accepted]: steps
        self._free_slots: list[int] = []
        self.num_taken = 0  # tokens read so far, without those that `take` returned
        self._changed()

    def __len__(self) -> int:
        return len(self.requests)

    def __contains__(self, request: Request) -> bool:
        row = self._row(request)
        return row < len(self) and self.requests[row] is request

    def _changed(self) -> None:
        self.table = Table(*self._cells)
        self._all = np.arange(len(self))
        self._samples: Samples | None = None  # those of the last step, if it was of all requests
        self._asks = int(np.bitwise_or.reduce(self.table.asks))
        self._top_k = int(self.table.top_k.max(initial=0))
        self._max_logprobs = int(self.table.logprobs.max(initial=-1))

    def _set_ends(self, tokens: Collection[int]) -> None:
        self._ends = set(tokens)
        # In order, with the codes of errors; the last one is no token, so that every token has one that is not smaller.
        self._end_ids = np.array(sorted({NOT_FINITE, NOTHING_LEFT, *tokens, 2**63 - 1}), np.int64)

    def requests_of(self, samples: Samples) -> list[Request]:
        """The requests of a step that are still here."""
        return [self.requests[row] for row in self._all[self._find(samples)[0]].tolist()]

    # Requests come and leave.

    def enter(self, request: Request, ledger: PageLedger) -> None:
        """Adds a request that is prefilled."""
        params = request.params
        if params.stop_token_ids and not self._ends.issuperset(params.stop_token_ids):
            self._set_ends((*self._ends, *params.stop_token_ids))
        cells = {
            "key": key_of(request),
            "owner": request.owner,
            "length": len(request),
            "limit": len(request.prompt) + request.max_tokens,
            "expected": len(request.prompt) + request.expected_output,
            "least": len(request.prompt) + params.min_tokens,
            "recorded": len(request.prompt) + params.selection,
            "pages": ledger.held(request),
            "even_pages": ledger.even_pages(request),
            "unread": len(request.placeholders),
            "unverified": 0,
            "drafts": len(request.drafts),
            "asks": request.asks,
            "top_k": params.num_best,
            "logprobs": -1 if params.logprobs is None else params.logprobs,
            "direct": request.owner == self._rank or request.tracked,
            "streamed": request.delivery == "tokens",
            "fresh": request.first_token_at is None,
            "slot": self._slot(),
        }
        row = self._row(request)
        self._cells = np.insert(self._cells, row, [cells[name] for name in Table._fields], axis=1)
        self._by_form = np.insert(self._by_form, row, 0, axis=1)
        self.requests.insert(row, request)
        self._changed()

    def leave(self, request: Request) -> None:
        """Removes a request and gives its object what the table knows; tokens that are not read are forgotten."""
        row = self._row(request)
        self._flush(row)
        self._free_slots.append(int(self.table.slot[row]))
        request.placeholders = []
        request.num_computed_tokens = max(request.num_computed_tokens, len(request) - 1)
        self._cells, self._by_form = (np.delete(cells, row, axis=1) for cells in (self._cells, self._by_form))
        del self.requests[row]
        self._changed()
        if not self.requests:
            self._set_ends(self._eos_token_ids)

    def _row(self, request: Request) -> int:
        return int(self.table.key.searchsorted(key_of(request)))

    def _slot(self) -> int:
        if not self._free_slots:
            slots = len(self._buffered)
            more = max(64, slots)
            self._free_slots = list(range(slots + more - 1, slots - 1, -1))
            self._tokens, self._buffered, self._accepted = (
                np.concatenate((old, np.zeros((more, *old.shape[1:]), np.int64)))
                for old in (self._tokens, self._buffered, self._accepted)
            )
        return self._free_slots.pop()

    def _flush(self, row: int) -> None:
        slot, request = self.table.slot[row], self.requests[row]
        request.count_rows(self._by_form[:, row].tolist())
        self._by_form[:, row] = 0
        request.output.extend(self._tokens[slot, : self._buffered[slot]].tolist())
        self._buffered[slot] = 0
        if self._num_drafts:
            for offered, accepted in np.argwhere(self._accepted[slot]).tolist():
                request.draft_stats += [(offered, accepted)] * int(self._accepted[slot, offered, accepted])
            self._accepted[slot] = 0

    def computed(self, request: Request) -> int:
        """Number of a request's tokens that certainly stay, and whose rows the steps in flight compute."""
        row = self._row(request)
        return int(self.table.length[row] - self.table.unverified[row]) - 1

    # A step is planned and launched.

    @property
    def _active(self) -> npt.NDArray[np.bool_]:
        """Requests with another step: not those whose last token has certainly been sampled and only has to be read."""
        return self.table.length - self.table.unverified < self.table.limit

    @property
    def decodes(self) -> bool:
        return bool(self._active.any())

    def give_pages(self, give: Callable[[Request, int], int]) -> list[Request]:
        """Gives requests the pages that they lack for their next step: for their tokens, for the drafts that it
        verifies, and for those that it makes but for the last. ``give`` is called with a request and the number of
        pages that it lacks, and returns its ``even_pages`` then, 0 if there are not so many. Returns the requests that
        got none."""
        table, number = self.table, self.draft_number.number
        needed = table.length
        if number or self._planned:  # otherwise no token is unverified
            wanted = np.minimum(table.length + 2 * number - 1, table.limit - 1)
            needed = np.maximum(table.length - table.unverified, wanted)
        lacks = -(-needed // self._page_size) - table.pages
        if not (lacks > 0).any():
            return []
        rows = ((lacks > 0) & self._active).nonzero()[0]
        lacks, requests = lacks[rows], [self.requests[row] for row in rows.tolist()]
        given = [give(request, pages) for request, pages in zip(requests, lacks.tolist(), strict=True)]
        table.pages[rows] += lacks * (np.array(given) > 0)
        table.even_pages[rows] = np.maximum(table.even_pages[rows], given)
        return [] if all(given) else [one for one, has in zip(requests, given, strict=True) if not has]

    def step(self) -> DecodeStep | None:
        """The next step of all requests that have one: for each its last token, and its drafts. None: there is none.

        If only the device knows the last token, it alone knows the drafts too: there are rows for as many as possible.
        """
        table, active, number = self.table, self._active, self.draft_number.number
        if self._made > number:
            self._keep_drafts(number)
        rows: slice | Ints = _ALL if active.all() else active.nonzero()[0]
        starts, unread, samples = table.length[rows] - 1, table.unread[rows], self._samples
        if not len(starts):
            return None
        on_device = (unread > 0) & (number > 0)
        if samples is None or number or self._planned or rows is not _ALL:
            counts = 1 + np.where(on_device, number, table.drafts[rows])
            of_each = table.key[rows], table.owner[rows], counts
            samples = Samples.by_rank(*of_each, self._world, self._max_logprobs)
            self._samples = samples if rows is _ALL else None
        self._planned = number
        asks = self._asks | NEEDS_HOST * bool((starts + 1 - unread < table.least[rows]).any())
        if asks & RECORDS and not (starts + 1 - unread < table.recorded[rows]).any():
            asks -= RECORDS
        own = samples.of_ranks(self._holders)
        columns = (self._all[rows], starts, samples.counts, on_device, samples.ranks)
        numbers = zip(*(column[own].tolist() for column in columns), strict=True)
        chunks = [
            Chunk(self.requests[row], start, count, self._alone[rank], count, follows)
            for row, start, count, follows, rank in numbers
        ]
        pages = int(table.even_pages[rows].max()) if len(self._holders) > 1 else 0
        least = max(0, (pages - 1) * self._page_size + 1)
        return DecodeStep(chunks, samples, starts, asks, self._top_k, least)

    def _keep_drafts(self, number: int) -> None:
        """Forgets the drafts of each request after its first ``number``."""
        table = self.table
        for row in ((table.drafts > number) & (table.direct > 0)).nonzero()[0].tolist():
            del self.requests[row].drafts[number:]
        np.minimum(table.drafts, number, out=table.drafts)
        self._made = number

    def launched(self, samples: Samples, rows_by_form: Ints | int | None = None) -> None:
        """Records that a step with these samples has been launched; see :meth:`.StepPlan.rows_by_form`."""
        table, (rows, at) = self.table, self._find(samples)
        counts = samples.counts[at]
        if isinstance(rows_by_form, int):
            self._by_form[rows_by_form, rows] += counts
        elif rows_by_form is not None:
            self._by_form[:, rows] += rows_by_form[at].T
        table.length[rows] += counts
        table.unread[rows] += counts
        if self._planned:
            table.unverified[rows] += counts - 1
        own = (table.owner[rows] == self._rank).nonzero()[0]
        first = samples.indices[at][own].tolist()
        for row, index, count in zip(_chosen(rows, own).tolist(), first, counts[own].tolist(), strict=True):
            self.requests[row].placeholders += range(index, index + count)

    # A step is read.

    def take(self, read: ReadSamples) -> tuple[list[RequestTokens], list[StepTokens]]:
        """Takes the tokens of a step; returns those of requests whose objects get them, and of those that may end with
        one of these: the caller appends them to the requests. All others are in the table. And what callers here get,
        if none of the requests has ended: of requests without log-probabilities, and of those with."""
        table, (rows, at) = self.table, self._find(read.samples)
        counts, tokens = read.samples.counts[at], read.tokens[at]
        table.unread[rows] -= counts
        ending = self._end_ids[self._end_ids.searchsorted(tokens)] == tokens
        accepted = offered = counts - 1
        if read.accepted is not None and read.offered is not None:
            accepted, offered = read.accepted[at], read.offered[at]
            table.length[rows] += 1 + accepted - counts
            table.unverified[rows] -= counts - 1
            # The last token that a request may have is not drafted, as no step would be saved.
            room = table.limit[rows] - table.length[rows] - 1
            self._made = max(self._made, made := tokens.shape[1] - 1)
            table.drafts[rows] = room.clip(0, made)
            ending &= np.arange(tokens.shape[1]) <= accepted[:, None]
        elif self._made:
            table.drafts[rows] = 0
        is_full = table.length[rows] - table.unread[rows] >= table.limit[rows]
        chosen = is_full | ending.any(axis=1) | (table.direct[rows] > 0)
        now = time.perf_counter()
        if self.draft_number.watches and len(read.samples.keys):
            self.draft_number.read(read.num_drafts, read.samples.max_requests)
        if self.draft_number.adapts and read.accepted is not None:
            self.draft_number.learn(offered, accepted)
        for row in self._all[rows][(table.fresh[rows] > 0) & (tokens[:, 0] >= 0)].tolist():
            self.requests[row].first_token_at = now
        table.fresh[rows] = 0
        streamed, scored = table.streamed[rows] > 0, table.logprobs[rows] >= 0
        streams = [
            StepTokens(
                now,
                table.key[_chosen(rows, numbers)] & ID_MASK,
                1 + accepted[numbers],
                tokens[numbers],
                read.logprobs_of(_chosen(at, numbers)) if wants else None,
                [],
            )
            for wants, numbers in enumerate((streamed & ~scored).nonzero() + (streamed & scored).nonzero())
            if len(numbers)
        ]
        numbers, others = chosen.nonzero()[0], (~chosen).nonzero()[0]
        if len(others):
            self._buffer(_chosen(rows, others), tokens[others], offered[others], accepted[others])
        columns = (_chosen(rows, numbers), _chosen(at, numbers), 1 + accepted[numbers])
        of_each = zip(*(column.tolist() for column in columns), strict=True)
        return [self._taken(row, number, count, read) for row, number, count in of_each], streams

    def _taken(self, row: int, number: int, count: int, read: ReadSamples) -> RequestTokens:
        """The ``count`` tokens of request ``number`` of a step, in this row."""
        request = self.requests[row]
        if not self.table.direct[row] or request.params.stop_strings:  # its caller may end it with this token
            self._flush(row)
        del request.placeholders[: int(read.samples.counts[number])]
        tokens, result, logprobs = read.tokens[number, :count].tolist(), None, None
        if request.params.logprobs is not None and request.delivery == "tokens":
            logprobs = read.logprobs_of(np.array([number]))[0, :count]
        if self._num_drafts:
            request.drafts = []
        if read.drafts is not None and read.offered is not None:
            request.drafts = read.drafts[number, : self.table.drafts[row]].tolist()
            result = DraftResult(int(read.offered[number]), count - 1)
        return RequestTokens(request, tokens, result, logprobs)

    def _buffer(self, rows: Ints, tokens: Ints, offered: Ints, accepted: Ints) -> None:
        """Keeps the first ``1 + accepted`` tokens of each row."""
        slots = self.table.slot[rows]
        first = self._buffered[slots]
        for number in range(tokens.shape[1]):
            self._tokens[slots, first + number] = tokens[:, number]
        self._buffered[slots] += 1 + accepted
        self.num_taken += len(rows) + int(accepted.sum())
        if self._num_drafts:
            self._accepted[slots, offered, accepted] += 1
        for row in rows[self._buffered[slots] >= _BUFFERED].tolist():
            self._flush(row)

    def _find(self, samples: Samples) -> tuple[slice | Ints, slice | Ints]:
        """The rows of those of these requests that are still here, and their numbers in the step."""
        keys = samples.keys
        if samples is self._samples or (len(keys) == len(self) and (keys == self.table.key).all()):
            return _ALL, _ALL
        rows = self.table.key.searchsorted(keys)
        numbers = (self.table.key[rows.clip(max=len(self) - 1)] == keys if len(self) else rows < 0).nonzero()[0]
        return rows[numbers], numbers


def _chosen(of: slice | Ints, numbers: Ints) -> Ints:
    return numbers if isinstance(of, slice) else of[numbers]
