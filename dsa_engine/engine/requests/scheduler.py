"""Decides which tokens are computed next.

Every rank runs the same scheduler on the same requests and takes the same decisions, so ranks need no messages to
agree.

The ranks of one context-parallel group prefill a request. The neighbours of ``dcp_size`` among them hold its pages
together; while it is prefilled, each such group has them all, then its owner's group keeps them, and the owner decodes
it. A request enters with the pages for its whole prefill, so no prefill waits for memory half-way, and takes each
further page when it decodes into it. If its owner's group has no free page, pages spill if there are hot rows
(``spilling.py``). If none can, the last request with pages there is preempted: it loses all pages, returns to the
queue, and is later prefilled again, prompt and output so far. Tokens whose pages are found in the prefix cache are not
computed again: their rows are on the device, in host memory behind it, or on another rank of the group.

Requests have an order, by priority and then by arrival. Among those of one priority the fewest tokens left to prefill
overtake, but the larger part of each step is filled in order (``PrefillStep``), so that a wait is bounded by the tokens
of those before it in order. Priorities have no such bound: a request waits for all that come with a lower number.

Every request ends, unless those before it in order never cease to come. The first is never preempted: the last is
preempted first, and a request alone in its owner's group has all the pages it can ever need (``Capacity.check``). While
the first waits it is offered room before all others, but for the time of one search on the disk; only a later one waits
for what an earlier one computes. If it does not fit, those that overtake it have an eighth of its tokens together; then
none enters before it. Those that run either end or return to the queue after it, so at worst it waits until the cache
is empty. Once it runs it is part of every prefill step and of every decode step, and neither kind of step waits for
ever for the other. When it ends, the next one is the first.
"""

from __future__ import annotations

import logging
from bisect import bisect_left, insort
from collections.abc import Collection, Iterable, Sequence
from heapq import merge
from operator import attrgetter, sub
from typing import TYPE_CHECKING, Any, NamedTuple

from dsa_engine.engine.cache.disk import DiskLoads
from dsa_engine.engine.cache.ledger import PageLedger, PrefixCache
from dsa_engine.engine.requests.decoding import Decoding
from dsa_engine.engine.requests.draft_number import DraftNumber
from dsa_engine.engine.requests.limits import Capacity, pages_for
from dsa_engine.engine.requests.prefill import (
    OVERTAKEN,
    OutputLengths,
    PrefillStep,
    RankLoad,
    choose_group,
    choose_owner,
)
from dsa_engine.engine.requests.request import Chunk, Request
from dsa_engine.engine.requests.samples import DecodeStep, Ints, Samples
from dsa_engine.engine.requests.spilling import BATCH, Spilling
from dsa_engine.errors import CapacityError

if TYPE_CHECKING:  # needs packages of the extra "serve"
    from dsa_engine.engine.cache.kv_events import KVEvents

_order, _length = attrgetter("order"), attrgetter("priority", "num_remaining", "id")


class Step(NamedTuple):
    """What is computed next: chunks to prefill, of all ranks, or the next tokens of all requests that decode."""

    chunks: list[Chunk]  # in a decode step those of the ranks that hold pages with this one
    decode: DecodeStep | None = None
    num_drafts: int = 0  # that it makes for each request

    def __bool__(self) -> bool:
        return bool(self.chunks) or self.decode is not None


class Queue:
    """Requests that wait, in two orders: by priority and arrival, and by priority and what is left to prefill."""

    def __init__(self) -> None:
        self.by_order: list[Request] = []
        self.by_length: list[Request] = []

    def __len__(self) -> int:
        return len(self.by_order)

    def __contains__(self, request: Request) -> bool:
        at = bisect_left(self.by_order, request.order, key=_order)
        return at < len(self) and self.by_order[at] is request

    def add(self, request: Request) -> None:
        insort(self.by_order, request, key=_order)
        insort(self.by_length, request, key=_length)

    def remove(self, request: Request) -> None:
        del self.by_order[bisect_left(self.by_order, _order(request), key=_order)]
        del self.by_length[bisect_left(self.by_length, _length(request), key=_length)]


class Scheduler:
    """Decides for all requests; a step prefills or decodes.

    ``max_prefill_share``, from 0 (excluded) to 1: maximum fraction of prefill steps among the steps taken while some
    request decodes. ``max_fetched_pages``: maximum number of pages that a rank sends, or receives, in a step.
    ``max_context``: see :class:`.PrefillStep`.
    """

    def __init__(
        self,
        capacity: Capacity,
        *,
        rank: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_prefill_share: float,
        enable_prefix_caching: bool = True,
        host_pages: int = 0,
        max_fetched_pages: int = 1,
        max_context: int | None = None,
        eos_token_ids: Collection[int] = (),
        events: KVEvents | None = None,
    ):
        cp_size = capacity.cp_size
        self._groups = [range(first, first + cp_size) for first in range(0, capacity.world_size, cp_size)]
        self._max_num_seqs = max_num_seqs
        # Of a group's prefill step, and of one while any request decodes; the same on all ranks.
        self.max_prefill_tokens = self.max_prefill_beside = max_num_batched_tokens * cp_size
        # Prefill steps that may be taken while any request decodes, now and after the step scheduled last: each step
        # earns a part of one. What is not used is capped at one: a late request is prefilled at once, without a burst.
        self._max_prefill_share, self._credit, self._credit_after = max_prefill_share, 0.0, 0.0
        self._rank, self._eos_token_ids = rank, eos_token_ids
        self.capacity = capacity
        forgotten = None if events is None else events.forgotten
        sizes = capacity.world_size, capacity.pages, host_pages, max_fetched_pages
        spilled = capacity.spilled, capacity.sets
        self.ledger = PageLedger(rank, *sizes, forgotten, capacity.dcp_size, *spilled)
        self.spilling = Spilling(self.ledger, self._front) if capacity.spilled else None
        self._pools = [*map(self.ledger.pools_of, self._groups)]  # of each group
        self.prefix_cache = PrefixCache(self.ledger, capacity.page_size, enable_prefix_caching, events)
        self.page_sources: list[DiskLoads] = []
        self._queue = Queue()
        self._prefilling: list[Request] = []  # in order
        self._max_context = max_context
        self._planned: PrefillStep | None = None  # the prefill step that has been scheduled last
        self._lengths = OutputLengths()
        self.num_deferred = 0  # of those waiting: what others compute, or the disk, lets them wait
        self.preemptions = 0  # times that a running request has lost its pages to one before it
        self.set_num_drafts([0])

    def set_num_drafts(self, choices: Sequence[int]) -> None:
        """Sets the numbers of drafts of a request in a step, in ascending order, while no request runs."""
        self.num_drafts = choices[-1]
        self.decoding = Decoding(self._rank, self.capacity, self._eos_token_ids, DraftNumber(choices))

    @property
    def has_work(self) -> bool:
        return bool(self._queue or self._prefilling or self.decoding.requests)

    @property
    def num_running(self) -> int:
        """Number of requests that have pages."""
        return len(self._prefilling) + len(self.decoding)

    @property
    def waiting(self) -> list[Request]:
        """Requests without pages, new or preempted, by priority and arrival."""
        return list(self._queue.by_order)

    @property
    def running(self) -> list[Request]:
        """Requests that have pages, by priority and arrival."""
        return sorted([*self._prefilling, *self.decoding.requests], key=_order)

    @property
    def free_pages(self) -> list[int]:
        """Of each pool."""
        return self.ledger.free

    @property
    def cache_usage(self) -> float:
        """Fraction of the pages of all ranks that requests hold."""
        return 1 - sum(self.free_pages) / (self.capacity.world_size * (self.ledger.pages + self.ledger.spilled))

    def add(self, request: Request) -> None:
        """Queues a request that can run (``capacity.check``)."""
        self.prefix_cache.enter(request)
        self._wait(request)
        request.credit = request.num_remaining

    def _wait(self, request: Request) -> None:
        pages = max(self.ledger.known(self.prefix_cache.usable(request), self._pools))
        request.num_tokens_found = self.capacity.page_size * pages
        request.expected_output = self._lengths.expected(request)
        self._queue.add(request)

    def admit_prefilled(self, request: Request) -> None:
        """Admits a request without a prefill, as its pages are filled in another way; it decodes from the next step on.
        It must be able to run (``capacity.check``)."""
        ledger, free, load = self.ledger, self.ledger.free, self._load()
        request.expected_output = self._lengths.expected(request)
        need, ranks = pages_for(request.num_prefill_tokens, self.capacity.page_size), range(self.capacity.world_size)
        fits = [r for r in ranks if free[pool := ledger.pool_of(r)] - load.reserved_pages[pool] >= need]
        hot, none, front = self.spilling, ledger.index.find(()), 0
        if hot is not None:
            front = self.capacity.front_pages(len(request) - self.prefix_cache.lookahead)
            asks = none, need, front, load.reserved_pages
            fits = [rank for rank in ranks if hot.fits([ledger.pool_of(rank)], *asks)]
        if self.num_running >= self._max_num_seqs or not fits:
            raise CapacityError(
                f"no room to fill the cache of another request of {len(request.prompt)} tokens: "
                f"{self.num_running} run of at most {self._max_num_seqs}, free pages are {free}; raise "
                "cache_memory or max_num_seqs"
            )
        owner = choose_owner(request, fits, load, free, self.capacity)
        request.cp_group, request.owner = owner // len(self._groups[0]), owner
        if hot is not None:
            hot.room_for(need, front)(ledger.pool_of(owner), none)
        ledger.take(request, ledger.pool_of(owner), need)
        if hot is not None:
            ledger.enter(request)
        request.num_computed_tokens = request.num_prefill_tokens
        self.decoding.enter(request, ledger)

    def schedule(self) -> Step:
        """Plans the next step, which takes effect once it is launched (:meth:`launched`). If it never is, requests that
        entered for it keep their pages."""
        decoding = self.decoding.decodes
        credit = min(1.0, self._credit) + self._max_prefill_share if decoding else self._credit
        self._credit_after = credit
        if (not decoding or credit > 1 - 1e-9) and (chunks := self._prefill()):
            self._credit_after = credit - decoding
            return self._step(chunks)
        # All requests that decode may be preempted if an older one in prefill holds the last pages; then prefill.
        decode = self._decode()
        return self._step(self._prefill()) if decode is None else self._step(decode.chunks, decode)

    def _step(self, chunks: list[Chunk], decode: DecodeStep | None = None) -> Step:
        return Step(chunks, decode, self.decoding.draft_number.number)

    def launched(self, step: Step, samples: Samples | None = None, rows_by_form: Ints | int | None = None) -> None:
        """Records that the step scheduled last has been launched, which tokens it samples, and in which form of
        attention it computes (:meth:`.StepPlan.rows_by_form`)."""
        self._credit = self._credit_after
        if step.decode is None and self._planned is not None:
            self._planned.charge()
        for number, chunk in enumerate([] if step.decode else step.chunks):
            request = chunk.request
            if rows_by_form is not None and not isinstance(rows_by_form, int):
                request.count_rows(rows_by_form[number].tolist())
            request.num_computed_tokens = chunk.end
            self.ledger.fetched(request, chunk.fetches)
            self.prefix_cache.name(request)
            if request.prefilled:
                self._prefilling.remove(request)
                self._prefilled(request, chunk.ranks)
        if samples is not None:
            self.decoding.launched(samples, rows_by_form if step.decode else None)
            if step.decode is not None and self.decoding.draft_number.launched():
                self.decoding.draft_number.choose(samples.max_requests)

    def _prefilled(self, request: Request, ranks: range) -> None:
        own = self.ledger.pool_of(request.owner)
        self.ledger.release(request, [pool for pool in self.ledger.pools_of(ranks) if pool != own])
        self.decoding.enter(request, self.ledger)

    def requests_of(self, step: Step | Samples) -> list[Request]:
        """The requests that a step computes, or samples for; without those that have left since."""
        if isinstance(step, Samples):
            return self.decoding.requests_of(step)
        return (
            [chunk.request for chunk in step.chunks] if step.decode is None else self.requests_of(step.decode.samples)
        )

    def finish(self, request: Request) -> None:
        """Removes a request in any state and frees its pages in every pool; called by ``Engine.finish``."""
        if request in self.decoding:
            self.decoding.leave(request)
        elif request in self._prefilling:
            self._prefilling.remove(request)
        elif request in self._queue:
            self._queue.remove(request)
        if request.output and request.finish_reason != "error":
            self._lengths.add(request.cache_salt, len(request.output))
        self.prefix_cache.release(request, failed=request.finish_reason == "error")

    def _prefill(self) -> list[Chunk]:
        """Chunks of the requests in prefill, and of those that enter: in order, then the shortest first."""
        self.num_deferred = 0
        if not (self._queue or self._prefilling):
            return []
        tokens = self.max_prefill_beside if self.decoding.decodes else self.max_prefill_tokens
        # Of each group the first request in order, or the one that will be it if it enters.
        first = {request.cp_group: [request] for request in reversed(self._prefilling)}
        of_groups = [[*self._queue.by_order[:1], *first.get(group, ())] for group in range(len(self._groups))]
        credits = [min(both, key=_order).credit if both else 0 for both in of_groups]
        limits = self.prefix_cache.least_computed, self._max_context
        step = self._planned = PrefillStep(self._groups, tokens, credits, self.ledger, *limits)
        deferred: set[Request] = set()
        refused = self._fill(step, self._queue.by_order, _order, None, deferred)
        step.let_overtake()
        self._fill(step, self._queue.by_length, _length, refused, deferred)
        self.num_deferred = len(deferred)
        return step.chunks

    def _fill(
        self, step: PrefillStep, queue: Iterable[Request], key: Any, refused: Request | None, deferred: set[Request]
    ) -> Request | None:
        """Adds requests to a step, those of the queue as long as there is room; returns the first one for which there
        is none. Those that overtake it, a ``refused`` one, have an eighth of its tokens together. A request that waits
        for another one's pages, or for the disk, is ``deferred`` and lets others enter."""
        running, waiting = sorted(self._prefilling, key=key), [*queue]
        prefilling = set(running)
        for request in merge(running, waiting, key=key):
            if request in prefilling:
                step.add(request)
                continue
            if not waiting or request in deferred:
                continue
            overtaken = refused if refused is not request else None
            cost = OVERTAKEN * request.num_remaining
            if self.num_running >= self._max_num_seqs or (
                overtaken is not None and (request.priority > overtaken.priority or cost > overtaken.credit)
            ):
                waiting.clear()  # no other one enters
            elif (usable := self._usable(request, deferred)) is None:
                continue
            elif step.is_full:
                waiting.clear()
            elif self._admit(request, usable, step):
                step.add(request)
                if overtaken is not None:
                    overtaken.credit -= cost
            elif refused is not request:
                waiting.clear()
                refused = refused or request
        return refused

    def _usable(self, request: Request, deferred: set[Request]) -> list[bytes] | None:
        """Digests of the pages that a waiting request need not compute; None if it waits for more of them."""
        usable = self.prefix_cache.usable(request)
        if self.prefix_cache.waits(request, usable, self._prefilling) or any(
            source.awaits(request, usable, self._best_group(usable)) for source in self.page_sources
        ):
            deferred.add(request)
            return None
        return usable

    def _best_group(self, usable: list[bytes]) -> range:
        known = self.ledger.known(usable, self._pools)
        return self._groups[known.index(max(known))]

    def _decode(self) -> DecodeStep | None:
        """The next tokens of all requests that decode, once these have pages; some may be preempted for the others."""
        while refused := self.decoding.give_pages(self.ledger.give):
            for pool in {self.ledger.pool_of(request.owner) for request in refused}:
                if self.spilling is not None and self.spilling.spill(pool, BATCH):
                    continue
                self.preempt(last := max(self._preemptible(pool), key=_order))
                if self.preemptions & (self.preemptions - 1) == 0:  # the 1st, 2nd, 4th, 8th, …
                    message = (
                        "the caches are full: request %s loses its pages and is computed again; raise cache_memory%s"
                    )
                    other = ", or let pages spill to host_cache_memory (hot_rows)"
                    instead = other if self.ledger.slots and self.spilling is None else ""
                    logging.getLogger(__name__).warning(message, last.id, instead)
        return self.decoding.step()

    def _preemptible(self, pool: int) -> Iterable[Request]:
        return self.ledger.holders(pool)

    def preempt(self, request: Request) -> None:
        """Takes all pages from a running request, which waits again."""
        if request in self.decoding:
            self.decoding.leave(request)
        else:
            self._prefilling.remove(request)
        self.prefix_cache.name(request)
        request.restart()
        self.prefix_cache.release(request)
        self._wait(request)
        request.preemptions += 1
        self.preemptions += 1

    def _front(self, request: Request) -> int:
        """See :class:`.Spilling`."""
        decodes = request in self.decoding
        computed = self.decoding.computed(request) if decodes else request.num_computed_tokens
        return self.capacity.front_pages(computed - self.prefix_cache.lookahead)

    def _load(self) -> RankLoad:
        return RankLoad.of(self.decoding, self._prefilling, self.ledger, self.capacity)

    def _admit(self, request: Request, usable: list[bytes], step: PrefillStep) -> bool:
        """Lets a request enter in ``step`` with its group, its owner and its first pages; returns False if no group has
        room."""
        ledger = self.ledger
        free, load = ledger.free, self._load()
        room = [*map(sub, free, load.reserved_pages.tolist())]
        pages = self.capacity.first_pages(request, self.num_drafts)
        hits = ledger.usable(usable, self._pools)
        fits, hot, front = {}, self.spilling, 0
        if hot is not None:
            front = self.capacity.front_pages(len(request) - self.prefix_cache.lookahead)
        for number, pools in enumerate(self._pools):
            if not step.has_room(number):
                continue
            if hot is not None:
                has_room = hot.fits(pools, hits[number], pages, front, load.reserved_pages)
            else:
                enough = pages <= min(room[pools[0] : pools[-1] + 1])  # as a rule, whatever is held
                has_room = enough or all(ledger.pools[pool].fits(hits[number], pages, room[pool]) for pool in pools)
            if has_room:
                fits[number] = self.capacity.page_size * len(hits[number])
        if not fits:
            return False
        request.cp_group = group = choose_group(fits, self._groups, self._prefilling, load)
        make_room = None if hot is None else hot.room_for(pages, max(front, len(hits[group])))
        absent = ledger.begin(request, self._pools[group], hits[group], pages, make_room)
        ranks = self._groups[group] if hot is None else hot.owners(self._groups[group])
        request.owner = choose_owner(request, ranks, load, free, self.capacity, absent)
        if hot is not None:
            ledger.enter(request)
        self._queue.remove(request)
        self.prefix_cache.admitted(request, len(hits[group]))
        request.num_tokens_found, request.credit = 0, min(request.credit, request.num_remaining)
        insort(self._prefilling, request, key=_order)
        return True
