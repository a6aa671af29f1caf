"""The loop of a rank that decodes: requests come from the prefill side with their pages, and their tokens go back.

An offered request waits, in the order of arrival, until a rank has room for it. Its pages are posted when the prefill
side begins to send them. It decodes when all of them have come and it has been handed over. All ranks of this side
take the same decisions; the ranks that receive a request's pages tell the leader, and so all, that they have come.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from dsa_engine.engine.cache.link import RankPages, by_rank
from dsa_engine.engine.disaggregation import messages
from dsa_engine.engine.disaggregation.schedulers import DecodeScheduler
from dsa_engine.engine.disaggregation.side import Side
from dsa_engine.engine.disaggregation.side_loop import SideLoop
from dsa_engine.engine.engine import Engine
from dsa_engine.engine.requests.request import Request
from dsa_engine.engine.requests.samples import StepTokens

_POLL_S = 0.0005  # seconds between looks at transfers, while there is nothing to compute


@dataclass(eq=False)
class _Arrival:
    """A request on its way to decode here."""

    request: Request
    posted: int = 0  # number of its first pages that have come, are under way, or were there already
    # By rank that holds its pages: number of its first pages of which the rank has its own, as all ranks know.
    landed: dict[int, int] = field(default_factory=dict)
    under_way: int = 0  # messages with its pages to this rank that have not come
    complete: bool = False  # whether its last page has been sent
    aborted: bool = False  # whether it has ended while pages are under way
    handover: messages.Handover | None = None  # its first token and drafts; None until the prefill side has them

    @property
    def pending(self) -> bool:
        """As all ranks know."""
        return any(pages < self.posted for pages in self.landed.values())


class DecodeLoop(SideLoop):
    def __init__(self, engine: Engine, side: Side):
        scheduler = engine.scheduler
        assert isinstance(scheduler, DecodeScheduler)
        self._scheduler = scheduler
        self._arrivals: dict[int, _Arrival] = {}  # by id: of requests that do not decode yet
        super().__init__(engine, side)

    @property
    def _idle(self) -> bool:
        return not (self._requests or self._unread or self._pending)

    @property
    def _pending(self) -> list[_Arrival]:
        return [arrival for arrival in self._arrivals.values() if arrival.pending]

    def _take(self, message: object) -> None:
        if isinstance(message, messages.Reserve):
            request = self.engine.make_request(message.add)
            request.output = message.output
            request.num_prefill_tokens = len(request)
            self._scheduler.add(request)
            self._arrivals[request.id] = _Arrival(request)
        elif isinstance(message, messages.TransferBegun):
            self._post(message.sent)
        elif isinstance(message, messages.Landed):
            self._land(self._arrivals[message.id], message)
        elif isinstance(message, messages.Handover):
            self._arrivals[message.id].handover = message
        elif isinstance(message, messages.Reset):
            self._scheduler.prefix_cache.reset()
        else:
            super()._take(message)

    def _turn(self) -> None:
        super()._turn()
        self._return()
        if self._pending:
            self._look()
            if not self._requests:
                time.sleep(_POLL_S)
        self._start_arrived()
        while (request := self._scheduler.reserve()) is not None:
            arrival = self._arrivals[request.id]
            arrival.posted, ledger = request.num_found_pages, self._scheduler.ledger
            pool = ledger.pool_of(request.owner)
            arrival.landed = dict.fromkeys(ledger.ranks_in(pool), arrival.posted)
            ranks = ledger.ranks_of(request, range(ledger.held(request)), range(pool, pool + 1))
            self.tell(messages.Reserved(request.id, np.array(self.engine.mesh.global_ranks)[ranks], arrival.posted))

    # Requests on their way.

    def _post(self, sent: Sequence[messages.Transfer]) -> None:
        """Receives the pages that one step of the prefill side sends."""
        receives, rank, size = list[RankPages](), self.engine.mesh.rank, self._scheduler.ledger.dcp_size
        for one in sent:
            arrival = self._arrivals[one.id]
            first, arrival.posted = arrival.posted, arrival.posted + len(one.sources)
            arrival.complete = one.last
            if rank in arrival.landed:
                pages = np.array(arrival.request.pages[first : arrival.posted])
                moves = by_rank(one.id, pages // size, pages % size == rank % size, one.sources)
                arrival.under_way += len(moves)
                receives += moves
        if receives:
            assert self.side.receiver is not None
            self.side.receiver.post(receives)

    def _look(self) -> None:
        """Tells the leader which pages have come here."""
        assert self.side.receiver is not None
        for move in self.side.receiver.poll():
            arrival = self._arrivals[move.id]
            arrival.under_way -= 1
            if not arrival.under_way:
                self.tell_leader(messages.Landed(move.id, self.engine.mesh.rank, arrival.posted))

    def _land(self, arrival: _Arrival, landed: messages.Landed) -> None:
        """Lets the senders of a request free its pages, if all have come."""
        arrival.landed[landed.rank] = landed.pages
        if arrival.pending:
            return
        if arrival.complete or arrival.aborted:
            self.tell(messages.TransferDone((arrival.request.id,)))
        if arrival.aborted:
            self._drop(arrival)

    def _start_arrived(self) -> None:
        """Lets requests decode whose pages and first token have come."""
        for number, arrival in list(self._arrivals.items()):
            handover, request = arrival.handover, arrival.request
            if handover is None or arrival.pending or not arrival.complete:
                continue
            del self._arrivals[number]
            request.output = handover.output
            request.delivery = "nothing" if self._line is None else "tokens"
            self._scheduler.start(request, handover.drafts)
            self._requests[number] = request

    def _drop(self, arrival: _Arrival) -> None:
        del self._arrivals[arrival.request.id]
        self.engine.finish(arrival.request, "abort")

    def _abort(self, ids: Sequence[int]) -> None:
        for arrival in [self._arrivals[number] for number in ids if number in self._arrivals]:
            if arrival.pending:
                arrival.aborted = True
                continue
            if arrival.posted > arrival.request.num_found_pages and not arrival.complete:
                self.tell(messages.TransferDone((arrival.request.id,)))
            self._drop(arrival)
        super()._abort(ids)

    # Requests that decode.

    def _hand_over(self, sampled: Sequence[StepTokens]) -> None:
        if sampled:
            self.tell(messages.Tokens(list(sampled), self._scheduler.cache_usage))
        super()._hand_over(sampled)

    def _return(self) -> None:
        """Sends preempted requests back. Their tokens have been read, or with drafts under way forgotten: a step that
        preempts a request does not compute it, and reads the step before."""
        for request in self._scheduler.waiting:
            if self._requests.pop(request.id, None) is not None:
                self._scheduler.finish(request)
                self.tell(messages.Preempted(request.id, request.output, request.draft_stats))
