"""Predictions beside measured runs on this machine, stage by stage.

Small runs give the cost of each stage, as the benchmarks' files do for ``--measured``. Larger runs are predicted from
them and then measured. In one process the larger runs are those of one emulated rank of several; the small ones are
those of a single process and of an emulated rank of two. Under torchrun both use the same ranks, and collectives are
predicted from the bytes that arrive at a rank.

Runs and ceilings are measured in turns, and medians over the turns count. A bootstrap over the turns shows how far the
result depends on them; if it does not decide whether a prediction is close enough, the check says so. Other work on
the machine is the usual cause.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from dsa_engine.commands.bench.prefill_benchmark import measure_prefill
from dsa_engine.commands.planner.prediction.devices import DEVICES
from dsa_engine.commands.planner.prediction.efficiency import Efficiencies, Entry, stage_seconds
from dsa_engine.kernels.runtime.integers import cdiv
from dsa_engine.llm import LLM
from dsa_engine.measure.across_ranks import barrier, from_all_ranks, stages_of_all_ranks
from dsa_engine.measure.ceilings import Ceilings
from dsa_engine.measure.costs.model_costs import Decode, ModelCosts, prefill_plans_of
from dsa_engine.measure.costs.work import Stages, Work
from dsa_engine.measure.emulation.config import EmulatedConfig
from dsa_engine.measure.emulation.mesh import follow_steps
from dsa_engine.measure.random_prompt import random_prompt
from dsa_engine.measure.report import environment, format_table
from dsa_engine.measure.stage_timer import mean_stages
from dsa_engine.measure.timed_generation import generate_batch
from dsa_engine.parallel import Mesh, ParallelConfig

EMULATED = 4  # ranks of the emulated world, in one process
TURNS = 7
OUTPUT = 17  # tokens of a decoding request
WITHIN = 0.25  # largest accepted relative error of a prediction
DRAWS = 200  # bootstrap samples of the turns


class CheckCase(NamedTuple):
    """A prefill of one prompt, or a decode step of several requests with so many cached tokens."""

    phase: str
    tokens: int
    requests: int = 1

    def __str__(self) -> str:
        if self.phase == "prefill":
            return f"prefill of {self.tokens:,} tokens"
        return f"decode step of {self.requests} requests at {self.tokens:,}"


SMALL = (
    CheckCase("prefill", 1024),
    CheckCase("prefill", 3072),
    CheckCase("decode", 1024),
    CheckCase("decode", 4096),
    CheckCase("decode", 2048, 8),
)
LARGE = (CheckCase("prefill", 6144), CheckCase("decode", 8192, 8))


@dataclass(frozen=True)
class Checked:
    """One run: seconds of every stage, predicted and measured.

    Attributes:
        draws: predicted over measured total, for each bootstrap sample.
    """

    case: CheckCase
    predicted: dict[str, float]
    measured: dict[str, float]
    draws: tuple[float, ...] = ()

    @property
    def ratio(self) -> float:
        """Predicted over measured total."""
        return sum(self.predicted.values()) / sum(self.measured.values())

    @property
    def interval(self) -> tuple[float, float]:
        """The interval that contains the ratio of nine in ten bootstrap samples."""
        if len(self.draws) < 2:
            return self.ratio, self.ratio
        cuts = statistics.quantiles(self.draws, n=20, method="inclusive")
        return cuts[0], cuts[-1]

    @property
    def verdict(self) -> str:
        low, high = self.interval
        near = [abs(ratio - 1) <= WITHIN for ratio in (low, high)]
        lies = f"the ratio lies between {low:.2f} and {high:.2f}"
        if all(near):
            return f"within {WITHIN:.0%}; {lies}"
        if low > 1 + WITHIN or high < 1 - WITHIN:
            return f"MISSES {WITHIN:.0%}; {lies}"
        return f"cannot be judged: by its repeats {lies}; run it again where nothing else runs"

    def to_json(self) -> dict[str, Any]:
        stages = {
            name: {"predicted_ms": self.predicted.get(name, 0.0) * 1e3, "measured_ms": seconds * 1e3}
            for name, seconds in self.measured.items()
        }
        low, high = self.interval
        ratios = {"predicted_over_measured": self.ratio, "interval_90_percent": [low, high], "verdict": self.verdict}
        return {"run": str(self.case), "stages": stages, **ratios}

    def table(self) -> str:
        rows = []
        for name, seconds in self.measured.items():
            guess = self.predicted.get(name, 0.0)
            if seconds or guess:
                rows.append((name, guess * 1e3, seconds * 1e3, f"{guess / seconds:.2f}" if seconds else ""))
        total = (sum(self.predicted.values()) * 1e3, sum(self.measured.values()) * 1e3)
        rows.append(("all", *total, f"{self.ratio:.2f}"))
        table = format_table((str(self.case), "predicted ms", "measured ms", "ratio"), rows)
        return f"{table}\n{str(self.case)[0].upper()}{str(self.case)[1:]}: {self.verdict}"


class Check:
    """Measures small and large runs, and predicts the large ones from the small ones.

    Args:
        model: a model with trained or random weights; the work does not depend on them.
        device: as :class:`~dsa_engine.LLM` takes it.
    """

    def __init__(self, model: str = "demo-random", device: str = "auto"):
        config = ParallelConfig()
        self._mesh: Mesh = config.create_mesh(device)
        common: dict[str, Any] = {"device": device, "max_num_seqs": 8, "max_model_len": 16384, "progress": False}
        common["enable_prefix_caching"] = False
        self._small = [LLM(model, parallel=config, **common)]
        self._large = self._small[0]
        if self._mesh.world_size == 1:
            of_two, of_several = (EmulatedConfig(emulate_world=ranks) for ranks in (2, EMULATED))
            self._small.append(LLM(model, parallel=of_two, **common))
            self._large = LLM(model, parallel=of_several, **common)

    @property
    def is_leader(self) -> bool:
        return self._mesh.is_leader

    def environment(self) -> dict[str, Any]:
        """Circumstances of the measurement."""
        engine = self._small[0].engine
        return environment(engine.mesh.device, engine.dtype, engine.mesh.world_size)

    @property
    def title(self) -> str:
        ranks = self._mesh.world_size
        if ranks > 1:
            return f"{ranks} ranks, predicted from small runs of theirs"
        return f"emulated rank 0 of {EMULATED}, predicted from small runs of one process and of an emulated rank of 2"

    def run(
        self, small: tuple[CheckCase, ...] = SMALL, large: tuple[CheckCase, ...] = LARGE, turns: int = TURNS
    ) -> list[Checked]:
        """Measures all cases ``turns`` times after one warm-up; returns the large ones."""
        runs = [(llm, case) for llm in self._small for case in small] + [(self._large, case) for case in large]
        works = [(case.phase, _work(llm, case)) for llm, case in runs]
        seen = []
        for turn in range(-1, turns):
            one = _Turn(self._rates(), [_measured(llm, case) for llm, case in runs])
            seen += [one] * (turn >= 0)
        compared = _compared(works, seen, large)
        drawing = random.Random(0)
        draws = [_compared(works, drawing.choices(seen, k=turns), large) for _ in range(DRAWS)]
        return [replace(one, draws=tuple(draw[i].ratio for draw in draws)) for i, one in enumerate(compared)]

    def _rates(self) -> tuple[float, float]:
        """Rates of a product and of a copy on the slowest rank, known to all ranks."""
        engine = self._small[0].engine
        mine = Ceilings.measure(engine.mesh.device, engine.dtype)
        rates = from_all_ranks(engine, [mine.flops_per_s, mine.bytes_per_s])
        return min(rank[0] for rank in rates), min(rank[1] for rank in rates)


class _Turn(NamedTuple):
    """The results of every run, once each."""

    rates: tuple[float, float]
    stages: list[dict[str, float]]


def _compared(works: Sequence[tuple[str, Stages]], turns: Sequence[_Turn], large: Sequence[CheckCase]) -> list[Checked]:
    """Predicts the last runs, the ``large`` ones, from the others; all values are medians over the turns."""
    rates = (statistics.median(turn.rates[i] for turn in turns) for i in range(2))
    device = DEVICES["H200"].with_ceilings(Ceilings(*rates))  # its other figures are not used
    entries = []
    for i, (phase, work) in enumerate(works):
        names = turns[0].stages[i]
        entries.append(Entry(phase, work, {n: statistics.median(turn.stages[i][n] for turn in turns) for n in names}))
    reached = Efficiencies.fitted(entries[: -len(large)], device, "small runs")
    checked = []
    for case, entry in zip(large, entries[-len(large) :], strict=True):
        guess = {n: stage_seconds(one, device, reached.of(case.phase, n))[0] for n, one in entry.work.items()}
        checked.append(Checked(case, guess, entry.seconds))
    return checked


def _measured(llm: LLM, case: CheckCase) -> dict[str, float]:
    """Seconds of each stage on the slowest rank, in one run.

    For decode it is the mean of the steps, not their median: if processes share a core, a short step is rarely
    interrupted and a long one often, so medians would make short steps look too cheap.
    """
    engine = llm.engine
    if case.phase == "prefill":
        ranks = measure_prefill(engine, random_prompt(engine, case.tokens, 0), warmup=0, repeat=0).stage_seconds
    else:
        follow_steps(engine)
        prompts = [random_prompt(engine, case.tokens, seed) for seed in range(case.requests)]
        barrier(engine)
        generation = generate_batch(engine, prompts, OUTPUT, watch=True, fill_cache=True)
        steps = [generation.passes[i].stage_seconds() for i in generation.decode_steps]
        ranks = stages_of_all_ranks(engine, mean_stages(steps))
    slowest = max(ranks, key=lambda stages: sum(stages.values()))
    return {name: slowest[name] for name in slowest}


def _work(llm: LLM, case: CheckCase) -> Stages:
    """Work of the busiest rank, and the bytes that it receives from the others."""
    engine = llm.engine
    costs, mesh, rows = ModelCosts.of(engine), engine.mesh, case.tokens
    if case.phase == "prefill":
        plans = prefill_plans_of(engine, case.tokens)
        stages, steps = costs.prefill(plans, mesh.rank), len(plans)
    else:
        own, context = cdiv(case.requests, mesh.world_size), case.tokens + OUTPUT // 2
        stages, steps, rows = costs.decode(Decode(own, case.requests, context)), 1, case.requests
    if mesh.world_size == 1:
        return stages
    passes, row = steps * costs.config.mlp_layer_types.count("sparse"), costs.config.hidden_size * engine.dtype.itemsize
    tokens = Work(activations=passes / steps * rows * row, passes=passes)
    stages["MoE dispatch"], stages["MoE combine"] = tokens, tokens
    if case.phase == "prefill" and mesh.communicates:
        stored = engine.cache.format
        layers = costs.config.num_hidden_layers
        gathered = rows * stored.packed_width() * stored.latent.pool_dtype.itemsize
        stages["communication"] = Work(activations=layers * gathered, passes=layers * steps)
    return stages
