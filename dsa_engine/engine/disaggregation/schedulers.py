"""The schedulers of the two sides."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dsa_engine.engine.requests.limits import pages_for
from dsa_engine.engine.requests.prefill import choose_owner
from dsa_engine.engine.requests.request import Chunk, Request
from dsa_engine.engine.requests.scheduler import Scheduler, Step


class PrefillScheduler(Scheduler):
    """Prefills, and never decodes: a request that is prefilled has left the queue, and keeps its pages on all ranks of
    its group until :meth:`sent` or :meth:`finish`."""

    def __init__(self, *args: Any, **named: Any):
        super().__init__(*args, **named)
        self.sending: set[Request] = set()  # their pages are being sent; they keep them also if they end
        self.away: set[Request] = set()  # they decode on the other side, or will
        self.away_usage = 0.0  # fraction of the decode side's pages that these held last

    @property
    def running(self) -> list[Request]:
        """Requests that have pages on either side, in order of arrival."""
        return sorted([*super().running, *self.away], key=lambda one: one.id)

    @property
    def cache_usage(self) -> float:
        """Fraction of the pages that requests hold, of the fuller side."""
        return max(super().cache_usage, self.away_usage if self.away else 0.0)

    def schedule(self) -> Step:
        return self._step(self._prefill())

    def _prefilled(self, request: Request, ranks: range) -> None:
        self.decoding.enter(request, self.ledger)  # until its first token is read

    def depart(self, request: Request) -> None:
        self.decoding.leave(request)
        self.away.add(request)

    def take_back(self, request: Request) -> None:
        """Queues a request that has lost its pages on the decode side, to be prefilled with all tokens that it has."""
        self.away.discard(request)
        request.preemptions += 1
        self.preemptions += 1
        request.num_computed_tokens, request.num_prefill_tokens, request.drafts = 0, len(request), []
        self.add(request)

    def finish(self, request: Request) -> None:
        self.away.discard(request)
        if request not in self.sending:
            super().finish(request)
        elif request in self.decoding:
            self.decoding.leave(request)
        elif request in self._prefilling:
            self._prefilling.remove(request)

    def sent(self, request: Request) -> None:
        """Frees the pages of a request that has been sent; others may still find them."""
        self.sending.discard(request)
        self.prefix_cache.release(request, failed=request.finish_reason == "error")


class DecodeScheduler(Scheduler):
    """Decodes requests that come with their pages, and never prefills: a request waits for room, then for its pages."""

    def reserve(self) -> Request | None:
        """Gives the first waiting request its owner and the pages for its prefilled tokens and its next step, and
        returns it; None if there is no room, without what a running request may need in its next step."""
        if not self._queue or self.num_running >= self._max_num_seqs:
            return None
        request, ledger, load = self._queue.by_order[0], self.ledger, self._load()
        limit = self.capacity.max_pages(len(request.prompt), request.max_tokens)
        tokens = request.num_prefill_tokens + 1 + 2 * self.num_drafts
        need = min(limit, pages_for(tokens, self.capacity.page_size))
        usable = self.prefix_cache.usable(request)
        hits = ledger.usable(usable, self._pools)  # of each group, which has one pool
        absent = {
            pool: need - len(its)
            for pool, (its, free) in enumerate(zip(hits, ledger.free, strict=True))
            if ledger.pools[pool].fits(its, need, free - int(load.reserved_pages[pool]))
        }
        if not absent:
            return None
        ranks = [rank for pool in absent for rank in self._groups[pool]]
        request.owner = owner = choose_owner(request, ranks, load, ledger.free, self.capacity, absent)
        request.cp_group = pool = ledger.pool_of(owner)
        ledger.begin(request, [pool], hits[pool], need)
        self._queue.remove(request)
        self.prefix_cache.admitted(request, len(hits[pool]))
        self._prefilling.append(request)
        return request

    def start(self, request: Request, drafts: Sequence[int]) -> None:
        """Lets a request that has room decode, as its rows have come: all but that of its last token."""
        self._prefilling.remove(request)
        request.num_prefill_tokens = request.num_computed_tokens = len(request) - 1
        request.drafts = list(drafts)
        self.prefix_cache.name(request)
        self.decoding.enter(request, self.ledger)

    def _prefill(self) -> list[Chunk]:
        return []

    def _preemptible(self, pool: int) -> list[Request]:
        # Not those whose rows are under way.
        return [one for one in self.decoding.requests if self.ledger.pool_of(one.owner) == pool]
