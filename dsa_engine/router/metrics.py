"""Metrics of the router for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric

from dsa_engine.router.replicas import Replicas
from dsa_engine.router.rule import Rule, Sent

_FIRST_BYTE = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 640)


class Metrics:
    """What was sent where. The label ``replica`` is its URL."""

    def __init__(self, replicas: Replicas, rule: Rule):
        self.registry = CollectorRegistry()
        self._replicas = replicas
        ProcessCollector(registry=self.registry)

        def counter(name: str, about: str, *labels: str) -> Counter:
            return Counter(f"dsa_engine_router_{name}", about, ["replica", *labels], registry=self.registry)

        self._responses = counter("responses", "Responses of replicas, by status", "status")
        self._failed = counter(
            "failed_attempts", "Requests that a replica refused or broke before the first byte", "reason"
        )
        self._broken = counter("broken_responses", "Responses that ended before their end")
        self._prompt_tokens = counter("prompt_tokens", "Tokens of prompts, estimated where they are texts")
        self._hit_tokens = counter("hit_tokens", "Those of them that were expected in the replica's prefix cache")
        self._first_byte = Histogram(
            "dsa_engine_router_time_to_first_byte_seconds",
            "Time from sending a request to the first byte of its response's body",
            ["replica"],
            buckets=_FIRST_BYTE,
            registry=self.registry,
        )
        for replica in replicas.all:
            for metric in (self._broken, self._prompt_tokens, self._hit_tokens, self._first_byte):
                metric.labels(replica.url)
        self.registry.register(_State(replicas, rule))

    def failed(self, replica: int, reason: str) -> None:
        """A request is to go on to another replica; ``reason``: a status, or the name of an error."""
        self._failed.labels(self._url(replica), reason).inc()

    def first_byte(self, sent: Sent, status: int, seconds: float) -> None:
        """The response of a replica has begun."""
        url = self._url(sent.replica)
        self._responses.labels(url, str(status)).inc()
        self._first_byte.labels(url).observe(seconds)
        if status < 300:
            self._prompt_tokens.labels(url).inc(sent.prompt.tokens)
            self._hit_tokens.labels(url).inc(sent.prompt.tokens - sent.uncached_tokens)

    def broken(self, replica: int) -> None:
        """A response has ended before its end, by the replica's fault."""
        self._broken.labels(self._url(replica)).inc()

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self.registry)

    def _url(self, replica: int) -> str:
        return self._replicas.all[replica].url


class _State:
    """A collector, which reads states and loads when it is asked."""

    def __init__(self, replicas: Replicas, rule: Rule):
        self._replicas, self._rule = replicas, rule

    def collect(self) -> Iterator[Metric]:
        rule = self._rule
        for name, about, value in (
            ("replica_ready", "1 while a replica may get requests", lambda one: float(one.usable)),
            ("requests", "Requests at a replica", lambda one: rule.requests(one.number)),
            ("waiting_tokens", "The load of a replica, in tokens", lambda one: rule.waiting_tokens(one.number)),
        ):
            gauge = GaugeMetricFamily(f"dsa_engine_router_{name}", about, labels=["replica"])
            for replica in self._replicas.all:
                gauge.add_metric([replica.url], value(replica))
            yield gauge

    def describe(self) -> list[Metric]:
        return []
