"""Seconds of each stage: its computation by a device's figures, and the collectives that it waits for."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from dsa_engine.commands.planner.prediction.deployment import Placed
from dsa_engine.commands.planner.prediction.efficiency import (
    CACHE_ROWS,
    TOP_K,
    Efficiencies,
    Products,
    stage_seconds,
)
from dsa_engine.config.model import ModelConfig
from dsa_engine.kernels.linear.block_scaled_matmul import QUANTISED_ROWS
from dsa_engine.measure.costs.work import SCORE_BYTES, Stages, Work

LINKS = "links"


@dataclass(frozen=True)
class StageTime:
    """Seconds of computation, seconds of communication that no work overlaps, and the largest part."""

    computed: float
    communicated: float
    limit: str
    hidden: float = 0.0  # seconds of communication under other work

    @property
    def seconds(self) -> float:
        return self.computed + self.communicated

    def __add__(self, other: StageTime) -> StageTime:
        limit = max(self, other, key=lambda one: one.seconds).limit
        sums = (self.computed + other.computed, self.communicated + other.communicated)
        return StageTime(*sums, limit, self.hidden + other.hidden)


def stages_json(stages: dict[str, StageTime]) -> dict[str, Any]:
    return {
        name: {
            "computed_ms": t.computed * 1e3,
            "communication_ms": t.communicated * 1e3,
            "hidden_communication_ms": t.hidden * 1e3,
            "limit": t.limit,
        }
        for name, t in stages.items()
    }


def timed(
    phase: str, placed: Placed, reached: Efficiencies, work: Stages, rows: float, eager: bool = False
) -> dict[str, StageTime]:
    """The stages of passes over ``rows`` rows each."""
    stages, launched = {}, {}
    if not reached.has_measured(phase, "lightning indexer"):
        work = _top_k_apart(placed.config, work)
    for name, one in work.items():
        sharded = placed.how.tp_size if name == "MLA epilog" else 1
        products, copies = _products(placed, rows * sharded), sharded > 1 < rows  # rows of some heads are copied apart
        efficiency = reached.of(phase, name, products, eager, copies)
        seconds, limit = stage_seconds(one, placed.device, efficiency)
        stages[name], launched[name] = StageTime(seconds, 0.0, limit), one.passes * efficiency.fixed
    # Without a graph the host launches one kernel after the other, on whatever stream.
    graph = phase == "decode" and not eager and not reached.has_measured(phase, "MLA prolog")
    if graph and placed.how.beside_queries and work.keys() >= {"MLA prolog", "indexer prolog"}:
        _beside_queries(stages, launched, work["MLA prolog"].passes * CACHE_ROWS * reached.launch)
    return stages


def _beside_queries(stages: dict[str, StageTime], launched: dict[str, float], moved: float) -> None:
    """Cache rows and the indexer's prolog on a second stream: the prologs take as long as the longer stream, but no
    less than what both compute and read.

    Args:
        launched: seconds of each stage that are launches.
        moved: those of MLA's prolog that store cache rows.
    """
    mla, indexer = stages["MLA prolog"], stages["indexer prolog"]
    queries, others = mla.computed - moved, indexer.computed + moved
    work = queries + others - launched["MLA prolog"] - launched["indexer prolog"]
    stages["MLA prolog"] = replace(mla, computed=queries)
    stages["indexer prolog"] = replace(indexer, computed=max(0.0, others - queries, work - queries))


def _products(placed: Placed, rows: float) -> Products:
    """The products of linear layers over so many rows."""
    if not placed.costs.formats.narrow_linear:
        return "plain"
    if placed.how.weights != "fp8":
        return "int8"
    return "fp8" if rows <= QUANTISED_ROWS else "fp8_many"


def _top_k_apart(config: ModelConfig, work: Stages) -> Stages:
    """The stages with the selection as one of its own: it reads the scores after all of them have been written."""
    apart: Stages = {}
    for name, one in work.items():
        apart[name] = one
        if name == "lightning indexer":
            pairs = one.flops / (2 * config.index_n_heads * (config.index_head_dim + 1))
            scores = SCORE_BYTES * pairs
            apart[name] = replace(one, activations=one.activations - scores)
            apart[TOP_K] = Work(activations=scores, passes=one.passes)
    return apart


def communicate(
    stages: dict[str, StageTime], placed: Placed, rows: int, gathered: int, logits: int, steps: int = 1, count: int = 1
) -> None:
    """Adds the collectives of ``count`` of ``steps``. The gather of cache rows overlaps with the queries' prolog, which
    consists mainly of q_b and the absorption."""
    for name, seconds, hides in placed.collectives(rows, gathered, logits):
        if hides:
            beside = sum(stages[n].computed for n in ("MLA prolog", "indexer prolog") if n in stages) / steps
            seconds = max(0.0, seconds - beside)
        add(stages, name, seconds * count)


def add(stages: dict[str, StageTime], name: str, seconds: float, hidden: float = 0.0) -> None:
    old = stages.get(name, StageTime(0.0, 0.0, LINKS))
    communicated = old.communicated + seconds
    limit = LINKS if communicated > old.computed else old.limit
    stages[name] = StageTime(old.computed, communicated, limit, old.hidden + max(0.0, hidden))
