"""The result of a serving benchmark: the figures of every request, and what follows from them."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dsa_engine.commands.bench.serving.load import ServingLoad
from dsa_engine.measure.percentiles import percentiles

METRICS = ("ttft", "tpot", "itl", "e2el")
GOALS = ("ttft", "tpot", "e2el")  # those with one value per request

NOT_SENT = "not sent: an earlier request of its conversation failed"


def latencies(begin: float, token_times: list[float], tokens: int) -> dict[str, Any]:
    """Times of one request in seconds: "ttft", "e2el", "tpot" (None for a single token) and "itl".

    Args:
        begin: time at which the request was sent.
        token_times: times at which tokens came, one or several at each.
        tokens: their number.
    """
    first, last = token_times[0], token_times[-1]
    return {
        "ttft": first - begin,
        "e2el": last - begin,
        "tpot": (last - first) / (tokens - 1) if tokens > 1 else None,
        "itl": [after - before for before, after in zip(token_times, token_times[1:], strict=False)],
    }


@dataclass(frozen=True)
class ServingResult:
    """Result of a serving benchmark. Times are in seconds.

    Attributes:
        duration: from the first request until all had ended.
        ranks: number of devices; None if a server keeps it to itself.
        requests: of each conversation and turn, in this order: conversation, turn, input_len, output_len,
            num_cached_tokens (None: the server does not say), error; without an error also ttft, tpot, itl, e2el.
        max_at_once: maximum number of requests at once.
        good: number of requests that met every goal; None without goals.
    """

    load: ServingLoad
    duration: float
    ranks: int | None
    requests: list[dict[str, Any]]
    max_at_once: int
    good: int | None

    @classmethod
    def of(
        cls,
        load: ServingLoad,
        duration: float,
        ranks: int | None,
        requests: list[dict[str, Any]],
        max_at_once: int,
        goals: Mapping[str, float],
    ) -> ServingResult:
        """Puts the requests in order, and adds those that were not sent, as failed ones.

        Args:
            goals: maximum seconds of "ttft", "tpot" and "e2el" for a request to count as good.
        """
        sent = {(r["conversation"], r["turn"]): r for r in requests}
        every = []
        for conversation, lengths in enumerate(load.lengths()):
            for turn, (input_len, _) in enumerate(lengths):
                about = {"conversation": conversation, "turn": turn, "input_len": input_len}
                missing = about | {"output_len": 0, "num_cached_tokens": None, "error": NOT_SENT}
                every.append(sent.get((conversation, turn), missing))
        good = sum(_is_good(r, goals) for r in every) if goals else None
        return cls(load, duration, ranks, every, max_at_once, good)

    @property
    def done(self) -> list[dict[str, Any]]:
        """The requests without an error."""
        return [r for r in self.requests if r["error"] is None]

    def hits(self, hit: bool = True) -> list[dict[str, Any]]:
        """The requests for which the prefix cache had some tokens; with False, those for which it had none."""
        return [r for r in self.done if r["num_cached_tokens"] is not None and bool(r["num_cached_tokens"]) == hit]

    def to_json(self) -> dict[str, Any]:
        """The result with the keys of ``vllm bench serve``, and the figures of every request under "requests".

        Further keys: "prefix_cache_hit_rate", the fraction of all input tokens that the prefix cache had (None: not
        known), and the times to the first token of requests with hits ("…_ttft_hit_ms") and without.
        """
        done = self.done
        tokens_in, tokens_out = (sum(r[key] for r in done) for key in ("input_len", "output_len"))
        cached = [r["num_cached_tokens"] for r in done]
        known = bool(done) and None not in cached
        result: dict[str, Any] = {
            "duration": self.duration,
            "completed": len(done),
            "failed": len(self.requests) - len(done),
            "total_input_tokens": tokens_in,
            "total_output_tokens": tokens_out,
            "total_cached_tokens": sum(cached) if known else None,
            "prefix_cache_hit_rate": sum(cached) / tokens_in if known else None,
            "request_throughput": len(done) / self.duration,
            "request_goodput": None if self.good is None else self.good / self.duration,
            "output_throughput": tokens_out / self.duration,
            "output_throughput_per_device": None if self.ranks is None else tokens_out / self.duration / self.ranks,
            "total_token_throughput": (tokens_in + tokens_out) / self.duration,
            "max_concurrent_requests": self.max_at_once,
        }
        for name in METRICS:
            seconds = [s for r in done for s in (r[name] if name == "itl" else [r[name]]) if s is not None]
            if seconds:
                result |= percentiles(name, seconds)
        for name, some in (("ttft_hit", self.hits()), ("ttft_miss", self.hits(False))):
            if some:
                result |= percentiles(name, [r["ttft"] for r in some])
        return result | {"requests": self.requests}


def compared(result: ServingResult, without: ServingResult | None) -> dict[str, Any]:
    """The JSON of a result beside that of the same traffic without hits, if this was measured.

    Returns:
        that of ``result``; "without_hits", that of the other one, with "…_ttft_hit_ms" of the requests that had hits in
        ``result``; "ttft_hit_ratios", for each of these requests its time to the first token without a hit, divided by
        that with the hit, and their median.
    """
    if without is None:
        return result.to_json()
    other = {(r["conversation"], r["turn"]): r for r in without.done}
    pairs = [(r["ttft"], other[key]["ttft"]) for r in result.hits() if (key := (r["conversation"], r["turn"])) in other]
    ratios = [before / after for after, before in pairs]
    same = percentiles("ttft_hit", [before for _, before in pairs]) if pairs else {}
    return result.to_json() | {
        "median_ttft_hit_ratio": statistics.median(ratios) if ratios else None,
        "ttft_hit_ratios": ratios,
        "without_hits": without.to_json() | same,
    }


def _is_good(request: Mapping[str, Any], goals: Mapping[str, float]) -> bool:
    if request["error"] is not None:
        return False
    return all(request[name] is None or request[name] <= limit for name, limit in goals.items())
