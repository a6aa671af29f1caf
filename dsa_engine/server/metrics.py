"""Metrics for Prometheus, under vLLM's names where they mean the same."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.multiprocess import MultiProcessCollector

from dsa_engine.outputs import RequestMetrics
from dsa_engine.server.messages import EngineFacts, EngineState

_TTFT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)
_TPOT = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5, 5)
_E2E = (0.1, 0.3, 0.5, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 60, 120, 240, 480, 960, 1920, 7680)
_TIMES = 1024  # between tokens, that are put into the histogram together
_LENGTHS = tuple(2**power for power in range(21))
_LABELS = ["model_name", "engine"]
_ENGINE = "0"  # the number of the one engine, which vLLM's dashboards ask for


class _Latencies(Histogram):
    def observe_all(self, seconds: list[float]) -> None:
        """Observes many times at once, in a tenth of the time."""
        self._sum.inc(sum(seconds))
        for bucket, count in enumerate(np.bincount(np.searchsorted(self._upper_bounds, seconds)).tolist()):
            if count:
                self._buckets[bucket].inc(count)


class Metrics:
    """What has been served, and what the engine is doing.

    Of several processes, which have ``PROMETHEUS_MULTIPROC_DIR``, any gives the sums over all. Memory and times of
    the engine's process are metrics too; every other metric has the labels ``model_name`` and ``engine``.
    """

    def __init__(self, facts: EngineFacts, model_name: str):
        self.registry = CollectorRegistry()
        self._shown = CollectorRegistry() if "PROMETHEUS_MULTIPROC_DIR" in os.environ else self.registry
        if self._shown is not self.registry:
            MultiProcessCollector(self._shown)
        ProcessCollector(pid=lambda: facts.pid, registry=self._shown)

        def histogram(name: str, about: str, buckets: tuple[float, ...]) -> _Latencies:
            made = _Latencies(name, about, _LABELS, buckets=buckets, registry=self.registry)
            return made.labels(model_name, _ENGINE)

        def counter(name: str, about: str) -> Counter:
            return Counter(name, about, _LABELS, registry=self.registry).labels(model_name, _ENGINE)

        def counters(name: str, about: str, label: str) -> Callable[[str], Counter]:
            made = Counter(name, about, [*_LABELS, label], registry=self.registry)
            return partial(made.labels, model_name, _ENGINE)

        self._ttft = histogram("vllm:time_to_first_token_seconds", "Time to the first token, with queueing", _TTFT)
        self._tpot = histogram(
            "vllm:request_time_per_output_token_seconds", "Mean time per token after the first, of a request", _TPOT
        )
        self._e2e = histogram("vllm:e2e_request_latency_seconds", "Time from arrival to the last token", _E2E)
        self._queue = histogram("vllm:request_queue_time_seconds", "Time from arrival to the first pages", _E2E)
        self._prefill = histogram("vllm:request_prefill_time_seconds", "Time from there to the first token", _E2E)
        self._decode = histogram("vllm:request_decode_time_seconds", "Time from the first token to the last", _E2E)
        self._inference = histogram("vllm:request_inference_time_seconds", "Prefill and decode together", _E2E)
        self._itl = histogram("vllm:inter_token_latency_seconds", "Time between tokens of a stream", _TPOT)
        self._prompts = histogram("vllm:request_prompt_tokens", "Tokens of a prompt", _LENGTHS)
        self._outputs = histogram("vllm:request_generation_tokens", "Tokens of an output", _LENGTHS)
        self._n = histogram("vllm:request_params_n", "Outputs asked for", (1, 2, 5, 10, 20))
        self._longest = histogram("vllm:request_max_num_generation_tokens", "Tokens of the longest of them", _LENGTHS)
        self._max_tokens = histogram("vllm:request_params_max_tokens", "Tokens that an output may have", _LENGTHS)
        self._preemptions = histogram("vllm:request_num_preemptions", "Times it lost its pages", (0, 1, 2, 5, 10))
        self._prompt_tokens = counter("vllm:prompt_tokens", "Tokens of prompts")
        self._output_tokens = counter("vllm:generation_tokens", "Generated tokens")
        self._ended = counters("vllm:request_success", "Outputs that have ended, by reason", "finished_reason")
        self._drafts = counter("vllm:spec_decode_num_drafts", "Steps of a request with drafts")
        self._draft_tokens = counter("vllm:spec_decode_num_draft_tokens", "Drafts that were checked")
        self._accepted = counter("vllm:spec_decode_num_accepted_tokens", "Drafts that were accepted")
        self._accepted_at = counters(
            "vllm:spec_decode_num_accepted_tokens_per_pos", "Accepted drafts by position", "position"
        )
        for reason in ("stop", "length", "abort", "error"):
            self._ended(reason)
        self._times: list[float] = []  # between tokens, which are not in the histogram yet
        self._state = _StateCollector(facts, model_name)
        self._shown.register(self._state)

    def finished(self, metrics: RequestMetrics, reason: str, prompt_tokens: int, output_tokens: int) -> None:
        """Counts an output that has ended; ``prompt_tokens`` is 0 for all outputs of a prompt but one."""
        self._count_times()
        self._ended(reason).inc()
        self._preemptions.observe(metrics.preemptions)
        self._prompt_tokens.inc(prompt_tokens)
        self._output_tokens.inc(output_tokens)
        self._outputs.observe(output_tokens)
        if prompt_tokens:
            self._prompts.observe(prompt_tokens)
        if not math.isnan(metrics.ttft_s):
            decode, queue = (metrics.tpot_s or 0.0) * max(0, output_tokens - 1), metrics.queue_s or 0.0
            self._ttft.observe(metrics.ttft_s)
            self._e2e.observe(metrics.ttft_s + decode)
            self._queue.observe(queue)
            self._prefill.observe(metrics.ttft_s - queue)
            self._decode.observe(decode)
            self._inference.observe(metrics.ttft_s - queue + decode)
        if metrics.tpot_s is not None:
            self._tpot.observe(metrics.tpot_s)
        if metrics.speculation is not None:
            self._drafts.inc(metrics.speculation.num_drafts)
            self._draft_tokens.inc(metrics.speculation.num_draft_tokens)
            self._accepted.inc(metrics.speculation.num_accepted_tokens)
            for position, accepted in enumerate(metrics.speculation.num_accepted_tokens_per_pos):
                self._accepted_at(str(position)).inc(accepted)

    def answered(self, max_tokens: int, output_tokens: Sequence[int]) -> None:
        """Counts a prompt whose outputs, which might have had so many tokens each, have all ended."""
        self._n.observe(len(output_tokens))
        self._longest.observe(max(output_tokens))
        self._max_tokens.observe(max_tokens)

    def came(self, tokens: int, seconds: float) -> None:
        """Counts the tokens of a piece of a stream that came so many seconds after the one before."""
        self._times += [seconds / tokens] * tokens
        if len(self._times) >= _TIMES:
            self._count_times()

    def _count_times(self) -> None:
        if self._times:
            self._itl.observe_all(self._times)
            self._times.clear()

    def unfinished(self, outputs: int, reason: str) -> None:
        """Counts outputs that have ended before their time: "abort" if the client left, or a limit was reached."""
        self._count_times()
        self._ended(reason).inc(outputs)

    def text(self, state: EngineState | None) -> bytes:
        """All metrics in Prometheus' text format; those of the engine's state as it is now, if it is known."""
        self._count_times()
        self._state.state = state
        return generate_latest(self._shown)


class _StateCollector:
    state: EngineState | None = None

    def __init__(self, facts: EngineFacts, model_name: str):
        self._labels = [model_name, _ENGINE]
        capacity = facts.limits.capacity
        blocks = capacity.world_size * (capacity.pages + capacity.spilled)
        pages = {"block_size": str(capacity.page_size), "num_gpu_blocks": str(blocks)}
        self._cache = {"cache_dtype": facts.cache.get("kv_cache_dtype", "")} | pages
        self._cache["enable_prefix_caching"] = facts.cache.get("enable_prefix_caching", "")

    def collect(self) -> Iterator[Metric]:
        def family(kind: Any, name: str, about: str, *values: float, **labels: Sequence[str]) -> Metric:
            """One with a value, or with one for each value of a further label."""
            made = kind(f"vllm:{name}", about, labels=[*_LABELS, *labels])
            for value, more in zip(values, zip(*labels.values()) if labels else [()]):
                made.add_metric([*self._labels, *more], value)
            return made

        cache = {label: [value] for label, value in self._cache.items()}
        gauge, counter, state = GaugeMetricFamily, CounterMetricFamily, self.state
        about = "Settings of the caches; blocks are the pages of all ranks together, block_size their tokens"
        yield family(gauge, "cache_config_info", about, 1, **cache)
        if state is None:
            return
        yield family(gauge, "num_requests_running", "Requests that have pages", state.running)
        yield family(gauge, "num_requests_waiting", "Requests that wait for pages", state.waiting)
        about = "Requests that wait: for pages (capacity), or for what others compute or the disk (deferred)"
        waiting, reasons = (state.waiting - state.deferred, state.deferred), ("capacity", "deferred")
        yield family(gauge, "num_requests_waiting_by_reason", about, *waiting, reason=reasons)
        about = "Fraction of cache pages that requests hold, on all ranks"
        yield family(gauge, "kv_cache_usage_perc", about, state.cache_usage)
        yield family(counter, "prefix_cache_queries", "Tokens of admitted requests", state.prefix_queries)
        yield family(counter, "prefix_cache_hits", "Those of them whose pages were found", state.prefix_hits)
        yield family(counter, "num_preemptions", "Times that a request has lost its pages", state.preemptions)
        held, spilled, selected, missed, fetched = state.hot_rows
        yield family(gauge, "spilled_pages", "Pages of requests whose latent rows lie in host memory", held)
        yield family(counter, "num_spills", "Pages that have spilled to host memory", spilled)
        about = "Latent rows of spilled pages that decode steps of the first rank have selected"
        yield family(counter, "hot_rows_queries", about, selected)
        yield family(counter, "hot_rows_hits", "Those of them that were in hot rows", selected - missed)
        yield family(counter, "hot_rows_fetched_bytes", "Bytes of the others, from host memory", fetched)
        steps = HistogramMetricFamily("vllm:iteration_tokens_total", "Tokens of a step of the engine", labels=_LABELS)
        below = list(accumulate(state.steps_by_tokens))
        buckets = [*zip(map(str, map(float, _LENGTHS)), below), ("+Inf", below[-1])]
        steps.add_metric(self._labels, buckets, state.counted_tokens)
        yield steps
