"""A prefill of one prompt, measured."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch

from dsa_engine.engine.engine import Engine
from dsa_engine.measure.across_ranks import agree_on_prompts, barrier, from_all_ranks
from dsa_engine.measure.emulation.links import Links
from dsa_engine.measure.emulation.mesh import EmulatedMesh, follow_steps
from dsa_engine.measure.emulation.overlap_model import Communication, Pass, watched
from dsa_engine.measure.peak_memory import peak_bytes, reset_peak
from dsa_engine.measure.reported_latency import Latency
from dsa_engine.measure.stage_timer import mean_stages, milliseconds


@dataclass(frozen=True)
class PrefillResult:
    """A prefill, measured. Lists have one value a rank; of an emulated run, that rank's alone."""

    input_len: int
    world_size: int
    seconds: list[float]  # of every repeat; of an emulated rank, its computation
    peak_memory_bytes: list[int]
    attention_pairs: list[int]  # query-key pairs under the causal mask
    imbalance: float  # most attention work of a rank over the average, of all ranks
    bytes_sent: list[int]  # payload put into collectives, per repeat
    stage_seconds: list[dict[str, float]]  # per repeat, averaged over the repeats
    logits: torch.Tensor  # float32 [vocab], after the last token; of an emulated rank they mean nothing
    communication: Communication | None = None  # modelled, of an emulated rank, per repeat

    @property
    def ttft(self) -> Latency:
        return Latency("ttft", self.seconds, self.input_len, self.world_size, self.communication)

    def to_json(self) -> dict[str, Any]:
        return {
            "input_len": self.input_len,
            **self.ttft.to_json("input_throughput"),
            "peak_memory_bytes": self.peak_memory_bytes,
            "attention_pairs": self.attention_pairs,
            "bytes_sent": self.bytes_sent,
            "imbalance": self.imbalance,
            "stage_ms": [milliseconds(rank) for rank in self.stage_seconds],
        }


def measure_prefill(
    engine: Engine, prompt: list[int], *, warmup: int = 1, repeat: int = 3, links: Links | None = None
) -> PrefillResult:
    """Prefills ``prompt`` ``warmup + repeat`` times; the same result on every rank.

    One context-parallel group computes it (all ranks, by default). A stage's time is what the main stream or thread
    spends in it: waits for what runs beside it are counted where they end. ``links`` are those of an emulated run.
    """
    mesh = engine.mesh
    agree_on_prompts(engine, [prompt])
    follow_steps(engine)
    reset_peak(mesh.device)
    for _ in range(warmup):
        engine.prefill(prompt)
    seconds: list[float] = []
    passes: list[Pass] = []
    sent = 0
    for _ in range(repeat):
        barrier(engine)
        sent -= sum(group.bytes_sent for group in mesh.groups)
        begin = time.perf_counter()
        with watched(engine) as watch:
            logits = engine.prefill(prompt)  # on the CPU: all device work is done
        seconds.append(time.perf_counter() - begin)
        sent += sum(group.bytes_sent for group in mesh.groups)
        passes.append(watch)
    seconds = [s - watch.emulation_seconds() for s, watch in zip(seconds, passes, strict=True)]
    stages = mean_stages([watch.stage_seconds() for watch in passes])
    communication = None
    if isinstance(mesh, EmulatedMesh):
        model = links or Links()
        communication = Communication.sum(watch.communication(model) for watch in passes).scaled(1 / repeat)
    pairs = [sum(step) for step in zip(*(p.attention_pairs() for p in engine.prefill_plans(len(prompt))), strict=True)]
    everybodys = from_all_ranks(engine, [float(peak_bytes(mesh.device)), sent / repeat, *stages.values(), *seconds])
    first = 2 + len(stages)
    return PrefillResult(
        input_len=len(prompt),
        world_size=mesh.world_size,
        seconds=[max(row[first + i] for row in everybodys) for i in range(repeat)],  # the slowest rank's
        peak_memory_bytes=[int(row[0]) for row in everybodys],
        attention_pairs=[pairs[mesh.rank]] if isinstance(mesh, EmulatedMesh) else pairs,
        imbalance=max(pairs) * len(pairs) / sum(pairs),
        bytes_sent=[int(row[1]) for row in everybodys],
        stage_seconds=[dict(zip(stages, row[2:first], strict=True)) for row in everybodys],
        logits=logits,
        communication=communication,
    )
