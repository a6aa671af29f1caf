"""Which tokens are computed next.

Every rank runs the same scheduler on the same requests and comes to the same decisions, so nothing has to be agreed by
messages. It counts the free pages of all ranks, and hands out the page numbers of its own.

A request is prefilled by the ranks of one context-parallel group, all of which hold its pages meanwhile; then its owner
keeps them and decodes it alone. It enters with the pages of what is to be prefilled, so no prefill waits for memory
half-way, and takes each further page when it decodes into it. Where its owner has none left, the youngest request with
pages there is preempted: it loses them all, goes back to its place in the queue, and is later prefilled again, prompt
and output so far.

Every request ends. The oldest is never preempted: it would have to be the only one with pages on its owner, and then it
has as many as it can ever need (``check``). While it waits it stands first in the queue, and nobody enters before it;
those that run end, or come back behind it: at worst it waits until the cache is empty. Once it runs it is first in
every prefill step and part of every decode step, and neither kind waits for ever for the other. When it ends, the next
one is the oldest.
"""

from __future__ import annotations

import logging
from bisect import insort
from collections import deque

from dsa_engine.engine.requests.owners import Load, choose_owner
from dsa_engine.engine.requests.pages import Capacity, PageLedger, pages_for
from dsa_engine.engine.requests.request import Chunk, Request
from dsa_engine.errors import CapacityError


class Scheduler:
    """Requests in order of arrival, first come, first served; a step prefills or decodes.

    Args:
        rank, world_size, cp_size: this rank's place; context-parallel groups are consecutive ranks.
        pages: pages of the cache, the same on every rank.
        page_size: tokens a page.
        max_num_seqs: most requests that run at once.
        max_num_batched_tokens: most tokens a rank prefills in a step.
        max_prefill_share: of the steps taken while some request decodes, at most this share are prefill steps, in
            (0, 1]; 1 puts prefill first.

    Attributes:
        num_drafts: most drafts of a request in a step.
        least_last_chunk: fewest tokens of the last chunk of what is prefilled in several; no step may have less room.
        ledger: which pages each request holds, on every rank.
        preemptions: times that a running request has lost its pages to an older one.
    """

    def __init__(
        self,
        *,
        rank: int,
        world_size: int,
        cp_size: int,
        pages: int,
        page_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_prefill_share: float,
    ):
        self._groups = [range(first, first + cp_size) for first in range(0, world_size, cp_size)]
        self._page_size = page_size
        self._max_num_seqs = max_num_seqs
        self._group_tokens = max_num_batched_tokens * cp_size
        self._budget: list[int] = []  # tokens that each group can still take in the step being planned
        self._max_prefill_share = max_prefill_share
        self.num_drafts = 0
        self.least_last_chunk = 1
        self._credit = 0.0  # prefill steps that may be taken while some request decodes
        self._credit_after = 0.0  # the same, once the step scheduled last has been launched
        self.ledger = PageLedger(rank, world_size, pages)
        self.capacity = Capacity(world_size, cp_size, pages, page_size)
        self._waiting: deque[Request] = deque()  # both in order of arrival
        self._running: list[Request] = []
        self.preemptions = 0

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running)

    @property
    def waiting(self) -> list[Request]:
        """Requests that have not entered, or have given way, in order of arrival."""
        return list(self._waiting)

    @property
    def running(self) -> list[Request]:
        """Requests that have pages, in order of arrival."""
        return list(self._running)

    @property
    def free_pages(self) -> list[int]:
        """Free pages of every rank."""
        return self.ledger.free

    @property
    def own_free_pages(self) -> int:
        """Page numbers that this rank has left to hand out."""
        return self.ledger.own_free

    def check(self, prompt_len: int, max_tokens: int) -> None:
        """Whether a request of this size can run, alone at least; see :meth:`.pages.Capacity.check`."""
        self.capacity.check(prompt_len, max_tokens)

    def add(self, request: Request) -> None:
        """Queues a request that can run (:meth:`check`)."""
        insort(self._waiting, request, key=_arrival)

    def adopt(self, request: Request) -> None:
        """Takes a request that can run (:meth:`check`) and needs no prefill, as its pages are filled otherwise: it
        decodes from the next step on.

        Raises:
            CapacityError: there is no room for it now.
        """
        free, load = self.ledger.free, Load.of(self._running, self.ledger, self.capacity)
        need = pages_for(request.num_prefill_tokens, self._page_size)
        fits = [r for r in range(len(free)) if free[r] - load.reserved_pages[r] >= need]
        if len(self._running) >= self._max_num_seqs or not fits:
            raise CapacityError(
                f"no room to fill the cache of another request of {len(request.prompt)} tokens: "
                f"{len(self._running)} run of at most {self._max_num_seqs}, free pages are {free}; raise "
                "cache_memory or max_num_seqs"
            )
        owner = choose_owner(request, fits, load, free, self.capacity)
        self.ledger.take(request, owner, need)
        request.cp_group, request.owner = owner // len(self._groups[0]), owner
        request.num_computed_tokens = request.num_prefill_tokens
        insort(self._running, request, key=_arrival)

    def schedule(self) -> list[Chunk]:
        """The next step: chunks of what is to be prefilled, or the new tokens of every request that decodes: one, or
        more after a :meth:`rewind`.

        A step counts when it is launched (:meth:`computed`). One that is not is scheduled anew: requests may have
        entered and taken pages for it, which they keep.
        """
        self._budget = [self._group_tokens] * len(self._groups)
        decoding = any(_decodes(request) for request in self._running)
        # Credit that is not used is kept up to one step: a late request is prefilled at once, a burst is not.
        self._credit_after = min(1.0, self._credit) + self._max_prefill_share if decoding else self._credit
        if not decoding or self._credit_after > 1 - 1e-9:
            chunks = self._prefill()
            if chunks:
                self._credit_after -= 1.0 if decoding else 0.0
                return chunks
        # An older request that is being prefilled may take the last pages of all that decode.
        return self._decode() or self._prefill()

    def computed(self, chunks: list[Chunk]) -> None:
        """Records that the step scheduled last has been launched; after its prefill, a request leaves the ranks that do
        not own it."""
        self._credit = self._credit_after
        for chunk in chunks:
            request = chunk.request
            request.num_computed_tokens = chunk.end
            if request.prefilled:
                for rank in chunk.ranks:
                    if rank != request.owner:
                        self.ledger.release(request, rank)

    def rewind(self, request: Request, num_computed_tokens: int) -> None:
        """Forgets the cache rows of a running request from this position on, and has its tokens there computed again.

        Its pages stay, and the same slots are written again: the next step needs them. From 0 they go back on every
        rank, and the request to its place in the queue: it is prefilled again, prompt and output.

        Raises:
            ValueError: see :meth:`.request.Request.rewind`.
        """
        request.rewind(num_computed_tokens)
        if num_computed_tokens == 0:
            self.ledger.release_all(request)
            self._running.remove(request)
            insort(self._waiting, request, key=_arrival)

    def accept_drafts(self, request: Request, drafts: list[int]) -> None:
        """Records what a step has made of a request's drafts: it has its new tokens, and ``drafts`` of the next ones.

        Rows of drafts that were not accepted are forgotten: its last token is the first to be computed again. The last
        token that it may still have is never drafted: nothing would be gained.
        """
        if not request.prefilled:
            return  # it has given way meanwhile
        request.rewind(len(request) - 1)
        request.drafts = drafts[: max(0, request.max_tokens - request.num_output_tokens - 1)]

    def finish(self, request: Request) -> None:
        """Forgets a request, in whatever state, and frees its pages on every rank; ``Engine.finish`` ends it."""
        if request in self._running:
            self._running.remove(request)
        elif request in self._waiting:
            self._waiting.remove(request)
        self.ledger.release_all(request)

    def _prefill(self) -> list[Chunk]:
        """Chunks of the requests that are being prefilled, then of those that can enter."""
        prefilling = [request for request in self._running if not request.prefilled]
        chunks = [chunk for request in prefilling if (chunk := self._prefill_chunk(request))]
        while self._waiting and len(self._running) < self._max_num_seqs:
            request = self._waiting[0]
            if not self._admit(request):
                break
            self._waiting.popleft()
            insort(self._running, request, key=_arrival)
            if chunk := self._prefill_chunk(request):
                chunks.append(chunk)
        return chunks

    def _prefill_chunk(self, request: Request) -> Chunk | None:
        left = request.num_prefill_tokens - request.num_computed_tokens
        length = min(left, self._budget[request.cp_group])
        if 0 < left - length < self.least_last_chunk:
            length = max(0, left - self.least_last_chunk)
        if length == 0:
            return None
        self._budget[request.cp_group] -= length
        return Chunk(request, request.num_computed_tokens, length, self._groups[request.cp_group])

    def _decode(self) -> list[Chunk]:
        """The tokens that are not computed, of every request that decodes and has, or gets, the pages for them."""
        for request in list(self._running):
            if _decodes(request):  # a younger one may have been preempted meanwhile
                self._allocate_pages(request)
        return [self._decode_chunk(request) for request in self._running if _decodes(request)]

    def _decode_chunk(self, request: Request) -> Chunk:
        """Its tokens that are not computed, and its drafts, each of which is compared with what is sampled before it.

        Where the device alone knows its last tokens, it alone knows its drafts: as many as there may be.
        """
        follows = self.num_drafts > 0 and bool(request.placeholders)
        start, drafts = request.num_computed_tokens, self.num_drafts if follows else len(request.drafts)
        owner = range(request.owner, request.owner + 1)
        return Chunk(request, start, len(request) + drafts - start, owner, 1 + drafts, follows)

    def _allocate_pages(self, request: Request) -> None:
        """Gives a request the pages for all its tokens, at the cost of the youngest on its rank: itself, perhaps."""
        ledger, owner = self.ledger, request.owner
        while request.prefilled and ledger.held(request, owner) < self.capacity.with_drafts(request, self.num_drafts):
            if ledger.free[owner]:
                ledger.take(request, owner, 1)
            else:
                self.preempt(max(ledger.holders(owner), key=_arrival))

    def preempt(self, request: Request) -> None:
        """Takes all pages of a running request; it is prefilled again when it has room, prompt and output."""
        self.rewind(request, 0)
        request.preemptions += 1
        self.preemptions += 1
        if self.preemptions & (self.preemptions - 1) == 0:  # the 1st, 2nd, 4th, 8th, …
            message = "the caches are full: request %s gives way and is computed again; raise cache_memory"
            logging.getLogger(__name__).warning(message, request.id)

    def _admit(self, request: Request) -> bool:
        """Gives a request its group, its owner and its first pages; False where no group has room.

        The work of decoding grows with the tokens that a rank's requests see, so the group and the owner are those that
        see fewest; but an owner with pages for all that its requests may still become goes before one without.
        """
        free, load = self.ledger.free, Load.of(self._running, self.ledger, self.capacity)
        need = self.capacity.with_drafts(request, self.num_drafts)
        fits = [
            number
            for number, ranks in enumerate(self._groups)
            if self._budget[number] > 0 and all(free[r] - load.reserved_pages[r] >= need for r in ranks)
        ]
        if not fits:
            return False
        group = min(fits, key=lambda number: sum(load.tokens[r] for r in self._groups[number]))
        request.cp_group, request.owner = group, choose_owner(request, self._groups[group], load, free, self.capacity)
        for rank in self._groups[group]:
            self.ledger.take(request, rank, need)
        return True


def _decodes(request: Request) -> bool:
    """Whether it decodes; not where its last token is sampled for certain and only to be read."""
    return request.prefilled and request.num_output_tokens - request.num_unverified < request.max_tokens


def _arrival(request: Request) -> int:
    return request.id
