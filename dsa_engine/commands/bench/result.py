"""The times of requests that were measured, and their JSON."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import Any

from dsa_engine.measure.assumed_acceptance import AssumedAcceptance
from dsa_engine.measure.report import percentiles
from dsa_engine.outputs import SpeculationMetrics


@dataclass(frozen=True, kw_only=True)
class Result:
    """Times of requests of one length, run together, in seconds.

    Stages have one dictionary per rank; they come from one more run, which was watched and is not among the timed ones.
    """

    input_len: int
    output_len: int = 1
    batch_size: int = 1
    ranks: int  # the number of ranks, emulated or not
    ttft: list[float]  # a sample per request and repeat; empty if caches were filled
    prefill: list[float]  # a sample per repeat: until the last request has its first token
    tpot: list[float] = field(default_factory=list)  # per repeat: of the median step in which the batch decodes
    beyond_median: list[float] = field(default_factory=list)  # per repeat: what all these steps took beyond that
    itl: list[float] = field(default_factory=list)  # a sample per such step
    peak_memory_bytes: list[int]  # per rank
    stages: dict[str, list[dict[str, float]]]  # "prefill": until all have a first token; "decode": per token after it
    num_speculative_tokens: int = 0
    speculation: SpeculationMetrics | None = None  # sum of all timed runs; None without drafts
    assumed_acceptance: AssumedAcceptance | None = None  # None: the model decided

    @property
    def size(self) -> str:
        """Length, batch size and, if there are any, drafts as text."""
        drafts = f", k = {self.num_speculative_tokens}" if self.num_speculative_tokens else ""
        return f"{self.input_len:,} × {self.batch_size}{drafts}"

    def to_json(self) -> dict[str, Any]:
        """Sizes; percentiles and samples of each time, in milliseconds; rates; what drafts gained; stages."""
        result: dict[str, Any] = {name: getattr(self, name) for name in ("input_len", "output_len", "batch_size")}
        for name in ("ttft", "prefill", "tpot", "itl", "beyond_median"):
            if seconds := getattr(self, name):
                samples = [round(s * 1e3, 4) for s in seconds]
                result |= percentiles(name, seconds) | {f"{name}_samples_ms": samples}
        for rate, seconds, tokens in (
            ("input_throughput", self.prefill, self.input_len * self.batch_size),
            ("output_throughput", self.tpot, self.batch_size),
        ):
            if seconds:
                result[rate] = tokens / statistics.median(seconds)
                result[f"{rate}_per_device"] = result[rate] / self.ranks
        if not self.ttft:
            result["cache"] = "filled with random rows"
        if self.speculation:
            names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_accepted_tokens_per_pos")
            result["num_speculative_tokens"] = self.num_speculative_tokens
            for name in (*names, "acceptance_rates", "mean_acceptance_length"):
                result[name] = getattr(self.speculation, name)
            if self.assumed_acceptance:
                result["assumed_acceptance"] = list(self.assumed_acceptance.rates)
        stage_ms = {
            phase: [{name: s * 1e3 for name, s in rank.items()} for rank in ranks]
            for phase, ranks in self.stages.items()
        }
        return result | {"peak_memory_bytes": self.peak_memory_bytes, "stage_ms": stage_ms}
