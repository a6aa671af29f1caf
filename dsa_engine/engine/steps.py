"""The loop of steps: what is scheduled, launched and read, and how a request ends.

The device must not wait for the host between two decode steps. So the next one is scheduled and launched before the
tokens of the one before are read: where a request's last token is not known yet, the device takes it from what it has
just sampled (:meth:`.request.Request.tokens`), and while it computes, the host reads that token, looks
whether the request ends, and makes text of it. Launched ahead are decode steps whose launch waits for nothing; before
a prefill, and before a graph is captured, what is under way is read and handed out, so that no token waits behind them.

A request that turns out to have ended is then part of one step too many. What that step samples for it is dropped. Its
pages may go to another one at once: the device works in order, and a row is written by its new owner before it is read.
"""

from __future__ import annotations

import time

from torch.profiler import record_function

from dsa_engine.engine.interrupts import uninterrupted
from dsa_engine.engine.request import Chunk, Request
from dsa_engine.engine.runner import ModelRunner
from dsa_engine.engine.sampler import Sampled, Samples
from dsa_engine.engine.scheduler import Scheduler
from dsa_engine.model.stages import observed


class Steps:
    """Runs steps. Every rank does the same.

    Args:
        scheduler, runner: of the engine.
        ends: the model's end-of-sequence tokens.
        ahead: launch a decode step before the tokens of the step before it are read.

    Attributes:
        launched_ahead: how often that has happened.
    """

    def __init__(self, scheduler: Scheduler, runner: ModelRunner, ends: tuple[int, ...], ahead: bool):
        self.ahead = ahead
        self.launched_ahead = 0
        self._scheduler = scheduler
        self._runner = runner
        self._ends = ends
        self._scheduled: list[Chunk] = []  # the next step, until it has been launched
        self._flying: list[Samples] = []  # of steps that have been launched and not read, oldest first

    def step(self) -> list[Sampled]:
        """Launches a step, or reads those under way that must be read before; returns what was read of requests that
        had not ended before. See ``Engine.step``."""
        # A step that is watched is read at once, or its time would be another's.
        stay = 1 if self.ahead and not observed() else 0
        sampled = self._read(stay)  # one too many is under way where an interrupt has come between
        chunks = [chunk for chunk in self._scheduled if chunk.request.finish_reason is None]
        if not chunks:
            with record_function("schedule"), uninterrupted():
                self._scheduled = chunks = self._scheduler.schedule()
        plan = self._runner.plan(chunks)
        if self._flying and not self._runner.runs_ahead(plan):
            return sampled + self._read(0)
        if not chunks:
            return sampled
        with record_function("launch"):
            launched = self._runner.launch(plan, self._flying[-1].tokens if self._flying else None)
        with uninterrupted():
            self._scheduled = []
            self._scheduler.computed(chunks)
            for request, place in launched.places.items():
                request.unread += 1
                request.place = place
            if launched.places:
                self.launched_ahead += bool(self._flying)
                self._flying.append(launched)
        # A step that samples nothing (a part of a prompt) does not keep what was sampled before it waiting.
        return sampled + self._read(stay if launched.places else 0)

    def finish(self, request: Request, reason: str, error: str | None = None) -> None:
        """Ends a request and frees its pages."""
        with uninterrupted():
            request.finish_reason, request.error = reason, error
            self._scheduler.finish(request)

    def _read(self, stay: int) -> list[Sampled]:
        """Reads the oldest steps until ``stay`` of them are under way."""
        taken = []
        while len(self._flying) > stay:
            with record_function("read tokens"):
                sampled = self._flying[0].read()
            with uninterrupted():
                del self._flying[0]
                now = time.perf_counter()
                for one in sampled:
                    one.request.unread -= 1
                    if one.request.finish_reason is None:
                        self._take(one, now)
                        taken.append(one)
        return taken

    def _take(self, sampled: Sampled, now: float) -> None:
        """Adds a sampled token to its request, and ends the request where it is the last one."""
        request, token, logprobs, error = sampled
        if error is not None:
            self.finish(request, "error", error)
            return
        request.output.append(token)
        if logprobs is not None:
            request.logprobs.append(logprobs)
        request.first_token = request.first_token or now
        request.last_token = now
        params = request.params
        ends = () if params.ignore_eos else self._ends
        stops = token in ends or token in (params.stop_token_ids or ())
        if stops and len(request.output) > params.min_tokens:
            self.finish(request, "stop")
        elif len(request.output) >= params.max_tokens:
            self.finish(request, "length")
