"""Metrics for Prometheus, under vLLM's names where they mean the same."""

from __future__ import annotations

import math
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from dsa_engine.engine.engine import Engine
from dsa_engine.outputs import RequestMetrics

_TTFT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)
_TPOT = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5, 5)
_E2E = (0.1, 0.3, 0.5, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 60, 120, 240, 480, 960, 1920, 7680)
_LENGTHS = tuple(2**power for power in range(21))


class Metrics:
    """What has been served, and what the engine is doing.

    Args:
        engine: is asked when the metrics are read.
        model_name: a label of every metric.
    """

    def __init__(self, engine: Engine, model_name: str):
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._model = {"model_name": model_name}

        def histogram(name: str, about: str, buckets: tuple[float, ...]) -> Histogram:
            made = Histogram(name, about, ["model_name"], buckets=buckets, registry=self.registry)
            return made.labels(model_name)

        def counter(name: str, about: str, *labels: str) -> Counter:
            return Counter(name, about, ["model_name", *labels], registry=self.registry)

        self._ttft = histogram("vllm:time_to_first_token_seconds", "Time to the first token, with queueing", _TTFT)
        self._tpot = histogram(
            "vllm:request_time_per_output_token_seconds", "Mean time per token after the first, of a request", _TPOT
        )
        self._e2e = histogram("vllm:e2e_request_latency_seconds", "Time from arrival to the last token", _E2E)
        self._prompts = histogram("vllm:request_prompt_tokens", "Tokens of a prompt", _LENGTHS)
        self._outputs = histogram("vllm:request_generation_tokens", "Tokens of an output", _LENGTHS)
        self._prompt_tokens = counter("vllm:prompt_tokens", "Tokens of prompts")
        self._output_tokens = counter("vllm:generation_tokens", "Generated tokens")
        self._ended = counter("vllm:request_success", "Outputs that have ended, by reason", "finished_reason")
        self._drafts = counter("vllm:spec_decode_num_drafts", "Steps of a request with drafts")
        self._draft_tokens = counter("vllm:spec_decode_num_draft_tokens", "Drafts that were checked")
        self._accepted = counter("vllm:spec_decode_num_accepted_tokens", "Drafts that were accepted")
        self._accepted_at = counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos", "Accepted drafts by position", "position"
        )
        for reason in ("stop", "length", "abort", "error"):
            self._ended.labels(model_name, reason)
        for plain in (self._prompt_tokens, self._output_tokens, self._drafts, self._draft_tokens, self._accepted):
            plain.labels(model_name)
        self.registry.register(_EngineState(engine, model_name))

    def finished(self, metrics: RequestMetrics, reason: str, prompt_tokens: int, output_tokens: int) -> None:
        """Counts an output that has ended; ``prompt_tokens`` is 0 for all outputs of a prompt but one."""
        self._ended.labels(finished_reason=reason, **self._model).inc()
        self._prompt_tokens.labels(**self._model).inc(prompt_tokens)
        self._output_tokens.labels(**self._model).inc(output_tokens)
        self._outputs.observe(output_tokens)
        if prompt_tokens:
            self._prompts.observe(prompt_tokens)
        if not math.isnan(metrics.ttft_s):
            self._ttft.observe(metrics.ttft_s)
            self._e2e.observe(metrics.ttft_s + (metrics.tpot_s or 0.0) * max(0, output_tokens - 1))
        if metrics.tpot_s is not None:
            self._tpot.observe(metrics.tpot_s)
        if metrics.speculation is not None:
            self._drafts.labels(**self._model).inc(metrics.speculation.num_drafts)
            self._draft_tokens.labels(**self._model).inc(metrics.speculation.num_draft_tokens)
            self._accepted.labels(**self._model).inc(metrics.speculation.num_accepted_tokens)
            for position, accepted in enumerate(metrics.speculation.num_accepted_tokens_per_pos):
                self._accepted_at.labels(position=str(position), **self._model).inc(accepted)

    def unfinished(self, outputs: int, reason: str) -> None:
        """Counts outputs that have ended before their time: "abort" if the client left, or a limit was reached."""
        self._ended.labels(finished_reason=reason, **self._model).inc(outputs)

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self.registry)


class _EngineState:
    """A collector, which reads the scheduler's counts when it is asked."""

    def __init__(self, engine: Engine, model_name: str):
        self._engine, self._model_name = engine, model_name

    def collect(self) -> Iterator[Metric]:
        scheduler, cache = self._engine.scheduler, self._engine.cache
        free = scheduler.free_pages
        for name, about, value in (
            ("vllm:num_requests_running", "Requests that have pages", len(scheduler.running)),
            ("vllm:num_requests_waiting", "Requests that wait for pages", len(scheduler.waiting)),
            (
                "vllm:kv_cache_usage_perc",
                "Fraction of cache pages that requests hold, on all ranks",
                1 - sum(free) / (len(free) * cache.pages),
            ),
        ):
            gauge = GaugeMetricFamily(name, about, labels=["model_name"])
            gauge.add_metric([self._model_name], value)
            yield gauge
        for name, about, value in (
            ("vllm:prefix_cache_queries", "Tokens of admitted requests", scheduler.prefix_cache.queries),
            ("vllm:prefix_cache_hits", "Those of them whose pages were found", scheduler.prefix_cache.hits),
            ("vllm:num_preemptions", "Times that a request has lost its pages", scheduler.preemptions),
        ):
            counter = CounterMetricFamily(name, about, labels=["model_name"])
            counter.add_metric([self._model_name], value)
            yield counter

    def describe(self) -> list[Metric]:
        return []
