"""The serving benchmark on the engine of this process: no figure includes network, HTTP or tokenizing."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from dsa_engine.commands.bench.serving.load import Conversation, ServingLoad
from dsa_engine.commands.bench.serving.result import ServingResult, latencies
from dsa_engine.engine.engine import Engine
from dsa_engine.engine.requests.request import Request
from dsa_engine.measure.across_ranks import barrier, from_all_ranks
from dsa_engine.sampling_params import SamplingParams


def check_serving(engine: Engine, load: ServingLoad) -> None:
    """Raises the errors that :func:`measure_serving` would raise for the longest request; runs nothing.

    Raises:
        ValueError, CapacityError: the request is not possible.
    """
    longest_in, longest_out = load.longest()
    if longest_in + longest_out > engine.max_model_len:
        raise ValueError(
            f"{longest_in} tokens and {longest_out} new ones exceed max_model_len {engine.max_model_len}; send shorter "
            "requests, or raise max_model_len"
        )
    engine.scheduler.capacity.check(longest_in, longest_out)


def measure_serving(
    engine: Engine,
    load: ServingLoad,
    goals: Mapping[str, float] | None = None,
    warmup: int = 1,
    *,
    hits: bool = True,
) -> ServingResult:
    """Sends the requests of ``load`` as they arrive, and waits for all of them. The prefix cache is empty at first.

    Rank 0's clock decides for all ranks when a request has arrived, so they send the same requests in the same step. A
    request's time begins when it is sent; if ``max_concurrency`` delays it, that is after its arrival, as in vLLM.

    Args:
        goals: maximum seconds of "ttft", "tpot" and "e2el" for a request to count as good.
        warmup: number of other requests that are run first and not counted.
        hits: whether requests may use what others have computed; False gives each its own ``cache_salt``.
    """
    vocabulary = engine.config.vocab_size
    conversations = load.conversations(vocabulary)
    barrier(engine)
    for _ in range(warmup):
        _Traffic(engine, load, [load.warmup(vocabulary)], [0.0], hits=False).run(lambda done: None)
    engine.scheduler.prefix_cache.reset()
    traffic = _Traffic(engine, load, conversations, load.arrivals(), hits)
    count = sum(len(conversation.questions) for conversation in conversations)
    with engine.progress(count, "requests", "serving" if hits else "serving without hits") as bar:
        duration = traffic.run(bar.update)
    requests = [one.to_json() for one in traffic.sent]
    return ServingResult.of(load, duration, engine.mesh.world_size, requests, traffic.max_at_once, dict(goals or {}))


@dataclass
class _Sent:
    """A request in progress and the times of its tokens."""

    conversation: int
    turn: int
    request: Request
    begin: float
    token_times: list[float] = field(default_factory=list)  # a time per step that gave tokens
    seen: int = 0

    def look(self, now: float) -> None:
        """Records the time of new tokens."""
        if len(self.request.output) > self.seen:
            self.seen = len(self.request.output)
            self.token_times.append(now)

    def to_json(self) -> dict[str, Any]:
        request = self.request
        about = {
            "conversation": self.conversation,
            "turn": self.turn,
            "input_len": len(request.prompt),
            "output_len": self.seen,
            "num_cached_tokens": request.num_cached_tokens or 0,
            "error": request.error,
        }
        return about if request.error is not None else about | latencies(self.begin, self.token_times, self.seen)


class _Traffic:
    """Sends the requests of conversations, and runs steps until all have ended.

    Attributes:
        sent: the requests, in the order in which they were sent.
        max_at_once: maximum number of them at once.
    """

    def __init__(
        self,
        engine: Engine,
        load: ServingLoad,
        conversations: list[Conversation],
        arrivals: list[float],
        hits: bool,
    ):
        self.sent: list[_Sent] = []
        self.max_at_once = 0
        self._engine, self._load, self._hits = engine, load, hits
        self._conversations, self._arrivals = conversations, arrivals
        self._running: list[_Sent] = []

    def run(self, done: Callable[[int], object]) -> float:
        """Returns the seconds until the last request ended.

        Args:
            done: called with the number of requests that have ended since the call before.
        """
        engine, begun = self._engine, 0
        limit = self._load.max_concurrency or len(self._conversations)
        begin = time.perf_counter()
        try:
            while self._running or begun < len(self._conversations):
                now = _rank_0s(engine, time.perf_counter() - begin)
                while begun < len(self._conversations) and self._arrivals[begun] <= now and len(self._running) < limit:
                    self._send(begun, 0, [])
                    begun += 1
                if not self._running:  # all arrived requests are done
                    time.sleep(min(0.01, max(0.0, self._arrivals[begun] - now)))
                    continue
                engine.step()
                after = time.perf_counter()
                for one in self._running:
                    one.look(after)
                done(self._follow())
            return time.perf_counter() - begin
        finally:
            for one in self.sent:
                engine.finish(one.request, "abort")

    def _send(self, conversation: int, turn: int, history: list[int]) -> None:
        spoken = self._conversations[conversation]
        prompt = history + spoken.questions[turn]
        params = SamplingParams(temperature=0.0, max_tokens=spoken.output_lens[turn], ignore_eos=self._load.ignore_eos)
        (add,) = self._engine.new_requests(prompt, params)
        add.id = next(self._engine.ids)
        add.cache_salt = None if self._hits else f"{conversation} {turn}"
        self._running.append(_Sent(conversation, turn, self._engine.queue(add), time.perf_counter()))
        self.sent.append(self._running[-1])
        self.max_at_once = max(self.max_at_once, len(self._running))

    def _follow(self) -> int:
        """Sends the next request of each conversation whose request has ended; returns the number of ended ones."""
        ended = [one for one in self._running if one.request.finish_reason is not None]
        self._running = [one for one in self._running if one.request.finish_reason is None]
        for one in ended:
            more = one.turn + 1 < len(self._conversations[one.conversation].questions)
            if more and one.request.error is None:
                self._send(one.conversation, one.turn + 1, one.request.prompt + one.request.output)
        return len(ended)


def _rank_0s(engine: Engine, value: float) -> float:
    """Rank 0's value, on every rank."""
    return value if engine.mesh.world_size == 1 else from_all_ranks(engine, [value])[0][0]
