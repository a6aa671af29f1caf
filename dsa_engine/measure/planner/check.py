"""Predictions beside measured runs on this machine, stage by stage.

Small runs say what each stage costs here, as the benchmarks' files do for ``--measured``; from them larger runs are
predicted, and these are measured too. In one process the larger runs are those of one emulated rank of several; the
small ones are of a process that is alone, and of an emulated rank of two. Under torchrun both are of the same ranks,
and collectives are predicted from the bytes that meet on a rank. Runs take turns; a stage counts by its fastest turn.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from dsa_engine.llm import LLM
from dsa_engine.measure.across_ranks import from_all_ranks
from dsa_engine.measure.ceilings import Ceilings
from dsa_engine.measure.costs.model_costs import Decode, ModelCosts
from dsa_engine.measure.costs.work import Stages, Work
from dsa_engine.measure.emulation.config import EmulatedConfig
from dsa_engine.measure.emulation.mesh import EmulatedMesh
from dsa_engine.measure.generation_benchmark import measure_latency
from dsa_engine.measure.planner.devices import DEVICES, Device
from dsa_engine.measure.planner.efficiency import Efficiencies, Entry, stage_seconds
from dsa_engine.measure.prefill_benchmark import measure_prefill
from dsa_engine.measure.random_prompt import random_prompt
from dsa_engine.measure.report import environment, format_table
from dsa_engine.parallel import Mesh, ParallelConfig

EMULATED = 4  # ranks, in one process
TURNS = 5
OUTPUT = 9  # tokens of a decoding request


class Case(NamedTuple):
    """A prefill of one prompt, or a decode step of several requests with so many cached tokens."""

    phase: str
    tokens: int
    requests: int = 1

    def __str__(self) -> str:
        if self.phase == "prefill":
            return f"prefill of {self.tokens:,} tokens"
        return f"decode step of {self.requests} requests at {self.tokens:,}"


SMALL = (
    Case("prefill", 1024),
    Case("prefill", 3072),
    Case("decode", 1024),
    Case("decode", 4096),
    Case("decode", 2048, 8),
)
LARGE = (Case("prefill", 6144), Case("decode", 8192, 8))


@dataclass(frozen=True)
class Checked:
    """One run: seconds of every stage, predicted and measured."""

    case: Case
    predicted: dict[str, float]
    measured: dict[str, float]

    @property
    def ratio(self) -> float:
        """Predicted over measured, in total."""
        return sum(self.predicted.values()) / sum(self.measured.values())

    def to_json(self) -> dict[str, Any]:
        stages = {
            name: {"predicted_ms": self.predicted.get(name, 0.0) * 1e3, "measured_ms": seconds * 1e3}
            for name, seconds in self.measured.items()
        }
        return {"run": str(self.case), "stages": stages, "predicted_over_measured": self.ratio}

    def table(self) -> str:
        rows = []
        for name, seconds in self.measured.items():
            guess = self.predicted.get(name, 0.0)
            if seconds or guess:
                rows.append((name, guess * 1e3, seconds * 1e3, f"{guess / seconds:.2f}" if seconds else ""))
        total = (sum(self.predicted.values()) * 1e3, sum(self.measured.values()) * 1e3)
        rows.append(("all", *total, f"{self.ratio:.2f}"))
        return format_table((str(self.case), "predicted ms", "measured ms", "ratio"), rows)


class Check:
    """Measures small runs and large ones, and predicts these from those.

    Args:
        model: with random weights or not; the work does not depend on them.
        device: as :class:`~dsa_engine.LLM` takes it.
    """

    def __init__(self, model: str = "demo-random", device: str = "auto"):
        config = ParallelConfig()
        self._mesh: Mesh = config.create_mesh(device)
        common: dict[str, Any] = {"device": device, "max_num_seqs": 8, "max_model_len": 16384, "progress": False}
        self._small = [LLM(model, parallel=config, **common)]
        self._large = self._small[0]
        if self._mesh.world_size == 1:
            of_two, of_several = (EmulatedConfig(emulate_world=ranks) for ranks in (2, EMULATED))
            self._small.append(LLM(model, parallel=of_two, **common))
            self._large = LLM(model, parallel=of_several, **common)

    @property
    def reports(self) -> bool:
        return self._mesh.reports

    def environment(self) -> dict[str, Any]:
        """Where and when it is measured."""
        engine = self._small[0].engine
        return environment(engine.mesh.device, engine.dtype, engine.mesh.world_size)

    @property
    def title(self) -> str:
        ranks = self._mesh.world_size
        if ranks > 1:
            return f"{ranks} ranks, predicted from small runs of theirs"
        return f"emulated rank 0 of {EMULATED}, predicted from small runs of one process and of an emulated rank of 2"

    def run(
        self, small: tuple[Case, ...] = SMALL, large: tuple[Case, ...] = LARGE, turns: int = TURNS
    ) -> list[Checked]:
        """Measures all cases ``turns`` times, after once to warm up; what came of the large ones."""
        device = self._device()
        runs = [(llm, case) for llm in self._small for case in small] + [(self._large, case) for case in large]
        seen = [_measured(llm, case) for llm, case in runs]
        for turn in range(turns):
            for i, (llm, case) in enumerate(runs):
                stages = _measured(llm, case)
                seen[i] = {name: min(s, seen[i][name]) if turn else s for name, s in stages.items()}
        entries = [Entry(c.phase, _work(llm, c), s) for (llm, c), s in zip(runs, seen, strict=True)]
        reached = Efficiencies.fitted(entries[: -len(large)], device, "small runs")
        return [
            Checked(
                case,
                {n: stage_seconds(one, device, reached.of(case.phase, n))[0] for n, one in entry.work.items()},
                entry.seconds,
            )
            for case, entry in zip(large, entries[-len(large) :], strict=True)
        ]

    def _device(self) -> Device:
        """This machine's measured rates, the slowest rank's on all of them."""
        engine = self._small[0].engine
        mine = Ceilings.measure(engine.mesh.device, engine.dtype)
        rates = from_all_ranks(engine, [mine.flops_per_s, mine.bytes_per_s])
        flops, moved = (min(rank[i] for rank in rates) for i in range(2))
        return DEVICES["H200"].with_ceilings(Ceilings(flops, moved))  # whose other figures nobody asks for


def _measured(llm: LLM, case: Case) -> dict[str, float]:
    """Seconds of each stage on the slowest rank, in one run."""
    engine = llm.engine
    if case.phase == "prefill":
        ranks = measure_prefill(engine, random_prompt(engine, case.tokens, 0), warmup=0, repeat=1).stage_seconds
    else:
        ranks = measure_latency(
            llm, case.tokens, OUTPUT, batch_size=case.requests, warmup=0, repeat=1, fill_cache=True
        ).decode_stages
    slowest = max(ranks, key=lambda stages: sum(stages.values()))
    return {name: slowest[name] for name in slowest}


def _work(llm: LLM, case: Case) -> Stages:
    """What the busiest rank does, and the bytes that come to it from the others."""
    engine = llm.engine
    costs, mesh, rows = ModelCosts.of(engine), engine.mesh, case.tokens
    if case.phase == "prefill":
        plans = engine.prefill_plans(case.tokens)
        stages, steps = costs.prefill(plans, mesh.rank), len(plans)
    else:
        own, context = -(-case.requests // mesh.world_size), case.tokens + OUTPUT // 2
        stages, steps, rows = costs.decode(Decode(own, case.requests, context)), 1, case.requests
    if mesh.world_size == 1:
        return stages
    passes, row = steps * costs.config.mlp_layer_types.count("sparse"), costs.config.hidden_size * engine.dtype.itemsize
    tokens = Work(activations=passes / steps * rows * row, passes=passes)
    stages["MoE dispatch"], stages["MoE combine"] = tokens, tokens
    if case.phase == "prefill" and not isinstance(mesh, EmulatedMesh):
        stored = engine.cache.format
        layers = costs.config.num_hidden_layers
        gathered = rows * stored.packed_width() * stored.latent.pool_dtype.itemsize
        stages["communication"] = Work(activations=layers * gathered, passes=layers * steps)
    return stages
