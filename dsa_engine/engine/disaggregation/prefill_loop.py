"""The loop of a rank that prefills: callers' requests come in here, and their results go out from here.

A request's way is drawn in docs/architecture/disaggregation.md. Room is for requests with pages on this side only:
those that are prefilled and wait for room could otherwise fill the caches here, while room is kept for one that cannot
enter. Pages stay as they are until the decode side says that they have come, also if the request ends meanwhile.

All ranks of this side take the same decisions, as they take the same messages. Only the leader's callers get tokens of
the decode side before that, in the thread that receives them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dsa_engine.engine.cache.link import RankPages, by_rank
from dsa_engine.engine.calls.call import Abort, Shutdown
from dsa_engine.engine.calls.jobs import Run
from dsa_engine.engine.disaggregation import messages
from dsa_engine.engine.disaggregation.schedulers import PrefillScheduler
from dsa_engine.engine.disaggregation.side import Side
from dsa_engine.engine.disaggregation.side_loop import SideLoop
from dsa_engine.engine.engine import Engine
from dsa_engine.engine.requests.limits import Add, pages_for
from dsa_engine.engine.requests.request import Chunk, Request
from dsa_engine.engine.requests.samples import Ended, Ints, StepTokens


@dataclass(eq=False)
class _Journey:
    """A request's way to the decode side."""

    request: Request
    ranks: Ints | None = None  # of each page the rank that it goes to, numbered in the run; None: there is no room yet
    gone: int = 0  # number of its first pages that have left, or that these ranks had already


class PrefillLoop(SideLoop):
    def __init__(self, engine: Engine, side: Side):
        scheduler = engine.scheduler
        assert isinstance(scheduler, PrefillScheduler) and engine.cache_steps is not None  # which sends its pages
        self._scheduler, self._cache_steps = scheduler, engine.cache_steps
        self._journeys: dict[int, _Journey] = {}  # by id: of requests whose pages have not all come, also if they end
        self._cache_steps.leaving.append(self._leaving_under)
        super().__init__(engine, side)

    @property
    def _idle(self) -> bool:
        runs = bool(self._backlog) and not self._requests and not self._journeys  # a job waits for all requests
        return not (runs or self.engine.has_work or self._unread)

    def _take(self, message: object) -> None:
        if isinstance(message, messages.Tokens):
            self._scheduler.away_usage = message.cache_usage
            for step in message.steps:
                self._scheduler.decoding.num_taken += int(step.counts.sum())
                for one in step.ended:
                    self._end_there(one)
        elif isinstance(message, messages.Reserved):
            self._give_room(message)
        elif isinstance(message, messages.TransferDone):
            for number in message.ids:
                request = self._journeys.pop(number).request
                self._cache_steps.ended(request)
                self._scheduler.sent(request)
        elif isinstance(message, messages.Preempted):
            if message.id in self._requests:
                request = self._requests[message.id]
                request.output = message.output
                request.draft_stats += message.draft_stats
                self._scheduler.take_back(request)
        else:
            if isinstance(message, Shutdown):
                self.tell(message)
            super()._take(message)

    def _offer(self, request: Request) -> None:
        """Asks for room for a request, unless its next token is its last one."""
        if request.max_tokens - len(request.output) > 1:
            self._journeys[request.id] = _Journey(request)
            params = replace(request.params, prompt_logprobs=None)  # they are computed here
            names = ("bad_words", "think_tokens", "id", "cache_salt", "priority", "page_digests")
            add = Add(request.prompt, params, **{name: getattr(request, name) for name in names})
            self.tell(messages.Reserve(add, list(request.output)))

    def _give_room(self, room: messages.Reserved) -> None:
        journey = self._journeys.get(room.id)
        if journey is None:
            return
        journey.ranks, journey.gone = room.ranks, room.first
        if journey.request.prefilled:
            assert self.side.sender is not None
            self.side.sender.begin(self._send([(journey, self._pages(journey.request))]))
            self.side.sender.finish()

    def _leaving_under(self, chunks: Sequence[Chunk]) -> list[RankPages]:
        """The pages that a step of these chunks fills and this rank sends; and tells the other side."""
        size, complete = self.engine.cache.page_size, []
        for chunk in chunks:
            if chunk.request.id in self._requests and chunk.request.id not in self._journeys:
                self._offer(chunk.request)
            journey = self._journeys.get(chunk.request.id)
            if journey is not None and journey.ranks is not None and chunk.length:
                last = chunk.end >= chunk.request.num_prefill_tokens
                complete.append((journey, self._pages(chunk.request) if last else chunk.end // size))
        return self._send(complete)

    def _pages(self, request: Request) -> int:
        return pages_for(request.num_prefill_tokens, self.engine.cache.page_size)

    def _send(self, complete: list[tuple[_Journey, int]]) -> list[RankPages]:
        """Tells the other side that these requests' pages up to a number leave now; returns those of this rank."""
        mesh, ledger, sends, sent = self.engine.mesh, self._scheduler.ledger, list[RankPages](), []
        for journey, end in complete:
            request, first = journey.request, journey.gone
            if end <= first:
                continue
            ranks = mesh.cp_ranks(request.cp_group)
            sources = ledger.ranks_of(request, range(first, end), ledger.pools_of(ranks))
            in_run = np.array(mesh.global_ranks)[sources]
            sent.append(messages.Transfer(request.id, in_run, end == self._pages(request)))
            if mesh.rank in ranks:
                assert journey.ranks is not None
                pages, ours = np.array(request.pages[first:end]) // ledger.dcp_size, sources == mesh.rank
                sends += by_rank(request.id, pages, ours, journey.ranks[first:end])
            journey.gone = end
            self._scheduler.sending.add(request)
        if sent:
            self.tell(messages.TransferBegun(tuple(sent)))
        return sends

    def _step(self) -> None:
        if self.engine.has_work or self._unread:
            super()._step()
        if self.side.sender is not None:
            self.side.sender.poll()

    def _begin(self, add: Add) -> None:
        super()._begin(add)
        request = self._requests[add.id]
        request.delivery, request.tracked = "tokens", True  # all ranks of this side act on the first token

    def _hand_over(self, sampled: Sequence[StepTokens]) -> None:
        ended = [self._requests[one.id] for step in sampled for one in step.ended if one.id in self._requests]
        super()._hand_over(sampled)  # a caller has its first token before the other side can send the second
        for request in ended:
            self._withdraw(request)
        for step in sampled:
            for number in step.ids.tolist():
                if number in self._journeys:
                    request = self._requests[number]
                    self._scheduler.depart(request)
                    self.tell(messages.Handover(number, list(request.output), list(request.drafts)))

    def _delivered(self, message: Any) -> None:
        """Gives callers their tokens at once: they would else wait for the end of a long step of this side."""
        if isinstance(message, messages.Tokens):
            for step in message.steps:
                self.calls.answer(step._replace(ended=[self._whole(one) for one in step.ended]))
        super()._delivered(message)

    def _whole(self, one: Ended) -> Ended:
        """A request that has ended on the other side, with the record of both sides."""
        if (request := self._requests.get(one.id)) is None:
            return one  # it was aborted meanwhile
        stats = [*request.draft_stats, *one.record.draft_stats]
        return one._replace(record=request.record._replace(draft_stats=stats))

    def _end_there(self, one: Ended) -> None:
        """Its caller has its tokens already."""
        self._scheduler.decoding.num_taken += len(one.tokens)
        if (request := self._requests.pop(one.id, None)) is not None:  # it was not aborted meanwhile
            request.finish_reason, request.error, request.stop_reason = one.ending
            self._scheduler.away.discard(request)

    def _abort(self, ids: Sequence[int]) -> None:
        for number in ids:
            if number in self._requests:
                self._withdraw(self._requests[number])
        super()._abort(ids)

    def _withdraw(self, request: Request) -> None:
        """Tells the other side that a request has ended; its journey ends too, unless its pages are being sent."""
        if request not in self._scheduler.sending:
            self._journeys.pop(request.id, None)
        self.tell(Abort((request.id,)))

    def _run(self, run: Run) -> None:
        if self._journeys:
            return
        if run.job == "reset_prefix_cache":
            self.tell(messages.Reset())
        super()._run(run)
