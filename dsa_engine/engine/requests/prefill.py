"""The prefill of requests: the group that prefills a request, and its owner, which decodes it and keeps its pages; the
chunks of a step; how long steps prefill while streams decode."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile
from typing import NamedTuple

import numpy as np

from dsa_engine.engine.cache.ledger import PageLedger
from dsa_engine.engine.requests.decoding import Decoding
from dsa_engine.engine.requests.limits import Capacity
from dsa_engine.engine.requests.request import Chunk, Fetch, Request
from dsa_engine.engine.requests.samples import Ints

_DECODE_STEPS = 8  # time of a prefill step without max_tpot, in decode steps
_SMOOTHING = 0.2  # weight of the newest decode step
_REMEMBERED = 64  # outputs of a salt that count; of older ones half
_SALTS = 1024  # whose outputs count
OVERTAKEN = 8  # others overtake a request by one of so many of its tokens, see `PrefillStep`


class OutputLengths:
    """The mean length of the outputs that have ended, by cache salt; the same on all ranks. Integers, as sums of floats
    depend on their order."""

    def __init__(self) -> None:
        self._sums: dict[str | None, tuple[int, int]] = {}  # outputs and their tokens; the latest salts are the last

    def add(self, salt: str | None, tokens: int) -> None:
        count, total = self._sums.pop(salt, (0, 0))
        if count == _REMEMBERED:
            count, total = count // 2, total // 2
        self._sums[salt] = count + 1, total + tokens
        if len(self._sums) > _SALTS:
            del self._sums[next(iter(self._sums))]

    def expected(self, request: Request) -> int:
        """Number of tokens that a request's output will probably have; its maximum if none of its salt has ended."""
        count, total = self._sums.get(request.cache_salt, (0, 0))
        mean = -(-total // count) if count else request.max_tokens
        return min(request.max_tokens, max(mean, len(request) - len(request.prompt) + 1))


class RankLoad(NamedTuple):
    """Load by the running requests: int64 ``[world]`` by those that each rank owns, and ``[pools]`` by those that hold
    pages there together."""

    tokens: Ints  # [world], tokens that the requests attend to
    requests: Ints  # [world], number of them
    future_pages: Ints  # [pools], pages that the requests are expected to ask for
    reserved_pages: Ints  # [pools], one for each request that may still grow: a new one must not preempt it at once

    @classmethod
    def of(cls, decoding: Decoding, prefilling: Iterable[Request], ledger: PageLedger, capacity: Capacity) -> RankLoad:
        table, world, size = decoding.table, capacity.world_size, capacity.dcp_size
        future, more = (
            -(-(tokens - 1) // capacity.page_size) - table.pages
            for tokens in (np.maximum(table.expected, table.length), table.limit)
        )
        pools, of_pools = table.owner // size, world // size
        load = cls(
            np.bincount(table.owner, table.length, world).astype(np.int64),
            np.bincount(table.owner, minlength=world),
            np.bincount(pools, np.maximum(future, 0), of_pools).astype(np.int64),
            np.bincount(pools, np.minimum(more, 1), of_pools).astype(np.int64),
        )
        for request in prefilling:
            expected, lacking = (
                capacity.max_pages(len(request.prompt), output) - ledger.held(request)
                for output in (request.expected_output, request.max_tokens)
            )
            load.tokens[request.owner] += len(request)
            load.requests[request.owner] += 1
            load.future_pages[request.owner // size] += max(expected, 0)
            load.reserved_pages[request.owner // size] += min(lacking, 1)
        return load


def choose_group(
    cached: Mapping[int, int], groups: Sequence[range], prefilling: Iterable[Request], load: RankLoad
) -> int:
    """Chooses the context-parallel group with the fewest tokens to prefill, the request's own included; among equal
    groups the one whose requests attend to the fewest tokens. ``cached``: by number of each group with room for the
    request, the tokens of the request that it need not prefill."""
    to_prefill = {number: -tokens for number, tokens in cached.items()}
    for other in prefilling:
        if other.cp_group in to_prefill:
            to_prefill[other.cp_group] += other.num_prefill_tokens - other.num_computed_tokens
    return min(
        cached,
        key=lambda number: (to_prefill[number], int(load.tokens[groups[number][0] : groups[number][-1] + 1].sum())),
    )


def choose_owner(
    request: Request,
    ranks: Iterable[int],
    load: RankLoad,
    free: Sequence[int],
    capacity: Capacity,
    absent: Mapping[int, int] | None = None,
) -> int:
    """Chooses the owner among ``ranks``; ``free`` lists the free pages of every pool.

    Ranks whose pool has enough pages for all that its requests and this one are expected to ask for come first. Among
    these, the pool is chosen whose requests attend to the fewest tokens; tokens of this request that it had to fetch
    count like those, so that a request goes back to its last owner unless that one has the longer contexts. Its ranks
    attend to them together, so the one with the fewest requests is chosen. ``absent``: by pool, the number of this
    request's pages that it had to fetch; default: none.
    """
    need, size = capacity.max_pages(len(request.prompt), request.expected_output), capacity.dcp_size
    tokens, future = load.tokens.reshape(-1, size).sum(axis=1).tolist(), load.future_pages.tolist()
    for pool, pages in (absent or {}).items():
        tokens[pool] += capacity.page_size * pages
    each = zip(free, future, tokens, strict=True)
    pools = [(pages - later < need, seen, -pages) for pages, later, seen in each]
    keys = [(*pools[rank // size], requests) for rank, requests in enumerate(load.requests.tolist())]
    return min(ranks, key=keys.__getitem__)


class PrefillStep:
    """A prefill step that is being planned: the requests added first have the first choice of a group's ``tokens``. A
    request's last chunk has at least ``least_computed`` tokens. ``max_context``: maximum number of tokens of earlier
    steps that the requests of a group have together, if they are several; None: any number.

    At least half of the tokens go to requests in order, by priority and arrival, and those that overtake have the rest,
    by the ``credits`` of the first request of each group: an eighth of the tokens that remain to it, and an eighth of
    those computed in order while it is the first. So until a request is prefilled, its group computes at most 1.25
    times its tokens and those of the requests before it, and the rest of the last step, however many others come.
    """

    def __init__(
        self,
        groups: Sequence[range],
        tokens: int,
        credits: Sequence[int],
        ledger: PageLedger,
        least_computed: int,
        max_context: int | None = None,
    ):
        self._planned: dict[Request, tuple[int, tuple[Fetch, ...]]] = {}  # tokens and fetches of each
        self._groups, self._ledger, self._least_computed = groups, ledger, least_computed
        self._spared = [min(tokens // 2, (credit + tokens) // (OVERTAKEN + 1)) for credit in credits]
        self._budget = [tokens - spared for spared in self._spared]  # tokens that each group can still prefill
        self._in_order: Mapping[Request, int] = {}  # tokens planned before `let_overtake`
        # Log-probabilities of a prompt take an LM head and the host's time for each token: others share their steps.
        self._scored_budget = [max(tokens // 4, least_computed)] * len(groups)
        self._max_context, self._context = max_context, [0] * len(groups)
        self._sent: Counter[int] = Counter()  # by rank, pages that it sends in the step
        self._received: Counter[int] = Counter()

    @property
    def chunks(self) -> list[Chunk]:
        return [
            Chunk(request, request.num_computed_tokens, length, self._groups[request.cp_group], fetches=fetches)
            for request, (length, fetches) in self._planned.items()
        ]

    @property
    def is_full(self) -> bool:
        return not any(self._budget)

    def has_room(self, group: int) -> bool:
        return self._budget[group] > 0

    def let_overtake(self) -> None:
        """Lets requests that are added from now on overtake."""
        self._in_order = {request: length for request, (length, _) in self._planned.items()}
        self._budget = [sum(both) for both in zip(self._budget, self._spared, strict=True)]

    def charge(self) -> None:
        """Counts what the first request of each group gives to others by this step, which is launched."""
        firsts: dict[int, Request] = {}
        given: Counter[int] = Counter()  # by group, tokens of those that overtake
        for request in sorted(self._planned, key=lambda one: one.order):
            first, length = firsts.setdefault(group := request.cp_group, request), self._planned[request][0]
            in_order = length if request is first else self._in_order.get(request, 0)
            first.credit += in_order
            given[group] += length - in_order
        for group, first in firsts.items():
            credit = first.credit - OVERTAKEN * min(given[group], self._spared[group])
            first.credit = max(0, min(credit, first.num_remaining - self._planned[first][0]))

    def add(self, request: Request) -> None:
        """Adds a request's chunk, or makes it longer; none if no tokens and no fetches are left for it."""
        planned, fetches = self._planned.get(request, (0, ()))
        if not planned:
            waiting = self._ledger.fetching(request)
            fetches = fetches or tuple(takewhile(self._fits, waiting))
            if len(fetches) < len(waiting):
                if fetches:
                    self._planned[request] = 0, fetches
                return
        remaining, group = request.num_remaining - planned, request.cp_group
        scored = request.prompt_logprobs is not None and len(request.prompt_logprobs) < len(request.prompt)
        length = min(remaining, self._budget[group], *([self._scored_budget[group]] if scored else []))
        if 0 < remaining - length < self._least_computed:
            length = max(0, remaining - self._least_computed)
        if not planned and length and self._max_context is not None and (own := request.num_computed_tokens):
            if (others := self._context[group]) and others + own > self._max_context:
                return
            self._context[group] += own
        if length or fetches:
            self._budget[group] -= length
            self._scored_budget[group] -= length if scored else 0
            self._planned[request] = planned + length, fetches

    def _fits(self, fetch: Fetch) -> bool:
        fits = max(self._sent[fetch.source], self._received[fetch.rank]) < self._ledger.max_fetched
        self._sent[fetch.source] += fits
        self._received[fetch.rank] += fits
        return fits


class PrefillPace:
    """Measures decode and prefill steps as they run, and says how many tokens a prefill step may have.

    What is measured are times between reads of tokens, since a device may be behind its host; so the cost of a prefill
    token contains the decode step beside it, and more with every chunk of a long prompt.

    ``max_tpot``: seconds between two tokens of a stream, prefill included; None: 8 decode steps for prefill. ``limit``:
    tokens of a group's prefill step while streams decode: ``least`` times a power of two, or the maximum, ``tokens``.
    """

    def __init__(self, max_tpot: float | None, tokens: int, least: int):
        self._max_tpot, self._tokens, self._least = max_tpot, tokens, min(least, tokens)
        self.limit = tokens
        self._decode: float | None = None  # seconds of a decode step
        self._token: float | None = None  # seconds of a prefill token
        self._since: float | None = None  # time of the last read
        self._prefilled = 0

    def begin(self, now: float) -> None:
        """A step begins; a time is measured from here if there was nothing to do before."""
        self._since = now if self._since is None else self._since

    def pause(self) -> None:
        self._since = None

    def read(self, now: float, prefilled: int) -> None:
        """Tokens have been read, and ``prefilled`` tokens of prompts computed so far, those of the fullest group."""
        assert self._since is not None, "begin() before each step"
        seconds, tokens = now - self._since, prefilled - self._prefilled
        self._since, self._prefilled = now, prefilled
        if tokens:
            if self._decode is None and self._token is not None:  # a first guess: no step has decoded alone yet
                self._decode = max(0.0, seconds - tokens * self._token)
            self._token = seconds / tokens
        elif not self._decode:
            self._decode = seconds
        else:
            self._decode += _SMOOTHING * (min(seconds, 2 * self._decode) - self._decode)
        if self._decode is None or self._token is None:
            return
        allowed = _DECODE_STEPS * self._decode if self._max_tpot is None else self._max_tpot - self._decode
        factor = max(1, int(allowed / (self._token * self._least)))
        self.limit = min(self._tokens, self._least << (factor.bit_length() - 1))
