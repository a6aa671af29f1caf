"""Measurements that the scripts report: prefill, time to first token, time per output token."""

from __future__ import annotations

import random
import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch

from dsa_engine.engine import Engine
from dsa_engine.llm import LLM
from dsa_engine.memory import peak_bytes, reset_peak
from dsa_engine.profiling import StageTimer
from dsa_engine.sampling import SamplingParams


def random_prompt(engine: Engine, length: int, seed: int = 0) -> list[int]:
    """``length`` random token ids."""
    rng = random.Random(seed)
    return [rng.randrange(engine.config.vocab_size) for _ in range(length)]


def percentiles(name: str, seconds: list[float]) -> dict[str, float]:
    """Mean, median, 90th and 99th percentile, least and most, in milliseconds, named as ``vllm bench`` names them."""
    ms = sorted(s * 1e3 for s in seconds)

    def at(share: float) -> float:
        return ms[min(len(ms) - 1, round(share * (len(ms) - 1)))]

    return {
        f"mean_{name}_ms": statistics.fmean(ms),
        f"median_{name}_ms": statistics.median(ms),
        f"p90_{name}_ms": at(0.9),
        f"p99_{name}_ms": at(0.99),
        f"min_{name}_ms": ms[0],
        f"max_{name}_ms": ms[-1],
    }


@dataclass(frozen=True)
class PrefillResult:
    """A prefill, measured. Lists have one value a rank."""

    input_len: int
    seconds: list[float]  # of every repeat
    peak_memory_bytes: list[int]
    attention_pairs: list[int]  # query-key pairs under the causal mask
    bytes_sent: list[int]  # payload put into collectives, per repeat
    stage_seconds: list[dict[str, float]]  # per repeat, averaged over the repeats
    logits: torch.Tensor  # float32 [vocab], after the last token

    @property
    def imbalance(self) -> float:
        """Most attention work of a rank over the average."""
        return max(self.attention_pairs) * len(self.attention_pairs) / sum(self.attention_pairs)

    def to_json(self) -> dict[str, Any]:
        ttft = percentiles("ttft", self.seconds)
        return {
            "input_len": self.input_len,
            **ttft,
            "input_throughput": self.input_len / ttft["median_ttft_ms"] * 1e3,  # tokens/s
            "peak_memory_bytes": self.peak_memory_bytes,
            "attention_pairs": self.attention_pairs,
            "bytes_sent": self.bytes_sent,
            "imbalance": self.imbalance,
            "stage_ms": [{name: s * 1e3 for name, s in rank.items()} for rank in self.stage_seconds],
        }


def measure_prefill(engine: Engine, prompt: list[int], *, warmup: int = 1, repeat: int = 3) -> PrefillResult:
    """Prefills ``prompt`` ``warmup + repeat`` times; the same result on every rank.

    One context-parallel group computes it (all ranks, by default). A stage's time is what the main stream or thread
    spends in it: waits for what runs beside it are counted where they end.
    """
    device, groups = engine.mesh.device, (engine.mesh.cp, engine.mesh.tp, engine.mesh.ep)
    reset_peak(device)
    for _ in range(warmup):
        engine.prefill(prompt)
    seconds, timer = [], StageTimer(device)
    sent = -sum(group.bytes_sent for group in groups)
    for _ in range(repeat):
        _barrier(engine)
        begin = time.perf_counter()
        with timer:
            logits = engine.prefill(prompt)  # on the CPU: all device work is done
        seconds.append(time.perf_counter() - begin)
    stages = {name: s / repeat for name, s in timer.seconds().items()}
    pairs = [sum(step) for step in zip(*(p.attention_pairs() for p in engine.prefill_plans(len(prompt))), strict=True)]
    sent += sum(group.bytes_sent for group in groups)
    everybodys = from_all_ranks(engine, [float(peak_bytes(device)), sent / repeat, *stages.values(), *seconds])
    first = 2 + len(stages)
    return PrefillResult(
        input_len=len(prompt),
        seconds=[max(row[first + i] for row in everybodys) for i in range(repeat)],  # the slowest rank's
        peak_memory_bytes=[int(row[0]) for row in everybodys],
        attention_pairs=pairs,
        bytes_sent=[int(row[1]) for row in everybodys],
        stage_seconds=[dict(zip(stages, row[2:first], strict=True)) for row in everybodys],
        logits=logits,
    )


@dataclass(frozen=True)
class LatencyResult:
    """Requests of one length, generated together. Times are in seconds."""

    input_len: int
    output_len: int
    batch_size: int
    ttft: list[float]  # of every request and repeat
    tpot: list[float]  # of every repeat: per token after the first, while the whole batch decodes
    peak_memory_bytes: list[int]  # per rank

    def to_json(self) -> dict[str, Any]:
        result: dict[str, Any] = {
            "input_len": self.input_len,
            "output_len": self.output_len,
            "batch_size": self.batch_size,
            **percentiles("ttft", self.ttft),
        }
        if self.tpot:
            result |= percentiles("tpot", self.tpot)
            result["output_throughput"] = self.batch_size / statistics.median(self.tpot)  # tokens/s
        return result | {"peak_memory_bytes": self.peak_memory_bytes}


def measure_latency(
    llm: LLM, input_len: int, output_len: int, *, batch_size: int = 1, warmup: int = 1, repeat: int = 3, seed: int = 0
) -> LatencyResult:
    """Generates ``output_len`` tokens for ``batch_size`` random prompts, ``warmup + repeat`` times."""
    engine = llm.engine
    params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)
    ttft, tpot = [], []
    reset_peak(engine.mesh.device)
    for i in range(warmup + repeat):
        prompts = [random_prompt(engine, input_len, seed + i * batch_size + b) for b in range(batch_size)]
        _barrier(engine)
        outputs = llm.generate(prompts, params)
        if i >= warmup:
            ttft += [o.metrics.ttft_s for o in outputs]
            # Requests that were prefilled before others have also waited for these; the quickest has only decoded.
            if output_len > 1:
                tpot.append(min(o.metrics.tpot_s or 0.0 for o in outputs))
    peaks = from_all_ranks(engine, [float(peak_bytes(engine.mesh.device))])
    return LatencyResult(input_len, output_len, batch_size, ttft, tpot, [int(row[0]) for row in peaks])


def from_all_ranks(engine: Engine, values: list[float]) -> list[list[float]]:
    """The same numbers of every rank, to every rank, in rank order."""
    mine = torch.tensor([values], dtype=torch.float64, device=engine.mesh.device)
    return engine.mesh.ep.all_gather(mine).tolist()


def _barrier(engine: Engine) -> None:
    from_all_ranks(engine, [0.0])
