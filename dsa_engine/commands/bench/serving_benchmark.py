"""Requests that arrive over time, as users send them: throughput, latencies and goodput of the running engine.

Fields and options are those of ``vllm bench serve`` with its random dataset. There is no server: requests go straight
to the engine of this process, so no figure includes network, HTTP or tokenizing.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from dsa_engine.config.checks import is_number
from dsa_engine.engine.engine import Engine
from dsa_engine.engine.requests.request import Request
from dsa_engine.measure.across_ranks import barrier, from_all_ranks
from dsa_engine.measure.percentiles import percentiles
from dsa_engine.sampling_params import SamplingParams

METRICS = ("ttft", "tpot", "itl", "e2el")
GOALS = ("ttft", "tpot", "e2el")  # those with one value per request


@dataclass(frozen=True)
class ServingLoad:
    """The requests and their arrival times; the same for the same seed.

    Attributes:
        num_prompts: number of requests.
        input_len, output_len: tokens of a request, on average.
        range_ratio: lengths are drawn evenly from ``len * (1 ± range_ratio)``; 0 ≤ range_ratio < 1.
        request_rate: mean number of arrivals per second; ``inf``: all at once.
        burstiness: shape of the gamma distribution of the gaps: 1 is a Poisson process, below 1 is burstier,
            above 1 is more even.
        max_concurrency: maximum number of requests at once; others wait and are sent later. None: no limit.
        seed: seed of lengths, tokens and arrivals.

    Raises:
        ValueError: a value is out of range; the text says what is allowed.
    """

    num_prompts: int = 100
    input_len: int = 1024
    output_len: int = 128
    range_ratio: float = 0.0
    request_rate: float = math.inf
    burstiness: float = 1.0
    max_concurrency: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("num_prompts", "input_len", "output_len", "max_concurrency"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
        for name in ("request_rate", "burstiness"):
            value = getattr(self, name)
            at_once = name == "request_rate" and value == math.inf
            if not (at_once or (is_number(value) and value > 0)):
                raise ValueError(f"{name} must be a number above 0, not {value}")
        if not 0 <= self.range_ratio < 1:
            raise ValueError(f"range_ratio must be at least 0 and below 1, not {self.range_ratio}")

    def arrivals(self) -> list[float]:
        """Seconds after the start, ascending; the first is 0."""
        rng = random.Random(f"arrivals {self.seed}")
        if math.isinf(self.request_rate):
            return [0.0] * self.num_prompts
        at, times = 0.0, [0.0]
        while len(times) < self.num_prompts:
            at += rng.gammavariate(self.burstiness, 1 / (self.request_rate * self.burstiness))
            times.append(at)
        return times

    def lengths(self) -> list[tuple[int, int]]:
        """(input, output) tokens of every request."""
        rng = random.Random(f"lengths {self.seed}")

        def draw(mean: int) -> int:
            low = max(1, math.floor(mean * (1 - self.range_ratio)))
            return rng.randint(low, max(low, math.ceil(mean * (1 + self.range_ratio))))

        return [(draw(self.input_len), draw(self.output_len)) for _ in range(self.num_prompts)]


@dataclass
class _Sent:
    """A request in progress and the times of its tokens."""

    request: Request
    begin: float
    token_times: list[float] = field(default_factory=list)  # a time per step that gave tokens
    seen: int = 0

    def look(self, now: float) -> None:
        """Records the time of new tokens."""
        if len(self.request.output) > self.seen:
            self.seen = len(self.request.output)
            self.token_times.append(now)

    def times(self) -> dict[str, Any]:
        """Seconds: "ttft", "e2el", "tpot" (None for a single token), and "itl", between steps that gave tokens."""
        first, last = self.token_times[0], self.token_times[-1]
        steps = zip(self.token_times, self.token_times[1:], strict=False)
        return {
            "ttft": first - self.begin,
            "e2el": last - self.begin,
            "tpot": (last - first) / (self.seen - 1) if self.seen > 1 else None,
            "itl": [after - before for before, after in steps],
        }


@dataclass(frozen=True)
class ServingResult:
    """Result of a serving benchmark. Times are in seconds.

    ``good`` is the number of requests that met every goal; None without goals.
    """

    load: ServingLoad
    duration: float
    ranks: int
    requests: list[dict[str, Any]]  # input_len, output_len, error; without an error also ttft, tpot, itl, e2el
    max_at_once: int
    good: int | None

    def to_json(self) -> dict[str, Any]:
        """The result with the keys of ``vllm bench serve``, and the figures of every request under "requests"."""
        done = [r for r in self.requests if r["error"] is None]
        tokens_in, tokens_out = (sum(r[key] for r in done) for key in ("input_len", "output_len"))
        result: dict[str, Any] = {
            "duration": self.duration,
            "completed": len(done),
            "failed": len(self.requests) - len(done),
            "total_input_tokens": tokens_in,
            "total_output_tokens": tokens_out,
            "request_throughput": len(done) / self.duration,
            "request_goodput": None if self.good is None else self.good / self.duration,
            "output_throughput": tokens_out / self.duration,
            "output_throughput_per_device": tokens_out / self.duration / self.ranks,
            "total_token_throughput": (tokens_in + tokens_out) / self.duration,
            "max_concurrent_requests": self.max_at_once,
        }
        for name in METRICS:
            seconds = [s for r in done for s in (r[name] if name == "itl" else [r[name]]) if s is not None]
            if seconds:
                result |= percentiles(name, seconds)
        return result | {"requests": self.requests}


def check_serving(engine: Engine, load: ServingLoad) -> None:
    """Raises the errors that :func:`measure_serving` would raise for the longest request; runs nothing.

    Raises:
        ValueError, CapacityError: the request is not possible.
    """
    longest_in, longest_out = (max(lengths) for lengths in zip(*load.lengths(), strict=True))
    if longest_in + longest_out > engine.max_model_len:
        raise ValueError(
            f"{longest_in} tokens and {longest_out} new ones exceed max_model_len {engine.max_model_len}; send shorter "
            "requests, or raise max_model_len"
        )
    engine.scheduler.capacity.check(longest_in, longest_out)


def measure_serving(
    engine: Engine, load: ServingLoad, goals: Mapping[str, float] | None = None, warmup: int = 1
) -> ServingResult:
    """Sends the requests of ``load`` as they arrive, and waits for all of them.

    Rank 0's clock decides for all ranks when a request has arrived, so they send the same requests in the same step. A
    request's time begins when it is sent; if ``max_concurrency`` delays it, that is after its arrival, as in vLLM.

    Args:
        goals: maximum seconds of "ttft", "tpot" and "e2el" for a request to count as good.
        warmup: number of requests of the mean length that are run first and not counted.
    """
    goals = dict(goals or {})
    rng = random.Random(f"tokens {load.seed}")
    vocabulary = engine.config.vocab_size
    lengths = load.lengths()
    prompts = [[rng.randrange(vocabulary) for _ in range(length)] for length, _ in lengths]
    barrier(engine)
    for _ in range(warmup):
        _send_all(engine, [(prompts[0], load.output_len)], [0.0], None, lambda done: None)
    engine.scheduler.prefix_cache.reset()
    with engine.progress(load.num_prompts, "requests", "serving") as bar:
        work = [(prompt, length) for prompt, (_, length) in zip(prompts, lengths, strict=True)]
        sent, duration, max_at_once = _send_all(engine, work, load.arrivals(), load.max_concurrency, bar.update)
    requests = [
        {"input_len": len(one.request.prompt), "output_len": one.seen, "error": one.request.error}
        | (one.times() if one.request.error is None else {})
        for one in sent
    ]
    good = sum(_is_good(r, goals) for r in requests) if goals else None
    return ServingResult(load, duration, engine.mesh.world_size, requests, max_at_once, good)


def _is_good(request: Mapping[str, Any], goals: Mapping[str, float]) -> bool:
    if request["error"] is not None:
        return False
    return all(request[name] is None or request[name] <= limit for name, limit in goals.items())


def _send_all(
    engine: Engine,
    work: list[tuple[list[int], int]],
    arrivals: list[float],
    max_concurrency: int | None,
    done: Callable[[int], object],
) -> tuple[list[_Sent], float, int]:
    """Returns the requests in order of arrival, seconds until the last one ended, and the maximum at once."""
    sent: list[_Sent] = []
    running: list[_Sent] = []
    max_at_once = 0
    begin = time.perf_counter()
    try:
        while running or len(sent) < len(work):
            now = _rank_0s(engine, time.perf_counter() - begin)
            room = len(work) if max_concurrency is None else max_concurrency - len(running)
            while len(sent) < len(work) and arrivals[len(sent)] <= now and room > 0:
                prompt, output_len = work[len(sent)]
                params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)
                sent.append(_Sent(engine.add(prompt, params), time.perf_counter()))
                running.append(sent[-1])
                room -= 1
            max_at_once = max(max_at_once, len(running))
            if not running:  # all arrived requests are done
                time.sleep(min(0.01, max(0.0, arrivals[len(sent)] - now)))
                continue
            engine.step()
            after = time.perf_counter()
            for one in running:
                one.look(after)
            unfinished = [one for one in running if one.request.finish_reason is None]
            done(len(running) - len(unfinished))
            running = unfinished
        return sent, time.perf_counter() - begin, max_at_once
    finally:
        for one in sent:
            engine.finish(one.request, "abort")


def _rank_0s(engine: Engine, value: float) -> float:
    """Rank 0's value, on every rank."""
    return value if engine.mesh.world_size == 1 else from_all_ranks(engine, [value])[0][0]
