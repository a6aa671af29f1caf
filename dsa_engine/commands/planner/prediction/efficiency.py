"""The part of a device's peak that each stage reaches, and the fixed cost of a pass through it.

    seconds = passes · fixed + max(operations / rate, bytes / bandwidth) / efficiency

Without measured runs the figures are assumptions, in this one place. Measured runs are entries of the benchmarks' JSON:
the counted work of every stage beside its time.
"""

from __future__ import annotations

import json
from collections.abc import Sequence, Set
from pathlib import Path
from typing import Any, Literal, NamedTuple

from dsa_engine.commands.planner.prediction.devices import Device
from dsa_engine.measure.ceilings import Ceilings
from dsa_engine.measure.costs.work import Stages, Work


class Efficiency(NamedTuple):
    """Efficiency of one stage."""

    compute: float  # fraction of the peak of matrix products
    memory: float  # fraction of the memory's bandwidth
    fixed: float  # seconds of a layer's pass through it, independent of its size


TOP_K = "top-k"  # a part of the measured "lightning indexer", predicted apart

Products = Literal["plain", "fp8", "fp8_many", "int8"]


class Counts(NamedTuple):
    """Kernels of a layer's stage in a decode step, by the products of linear layers and experts: with 16-bit operands;
    in FP8, whose kernel quantises few rows itself; in FP8 of more rows; in INT8."""

    plain: int
    fp8: int
    fp8_many: int
    int8: int

    @classmethod
    def same(cls, count: int) -> Counts:
        return cls(count, count, count, count)


# Counted on a fake device (tests/engine/test_stage_launches.py), with a cache in FP8.
KERNELS = {
    "embedding": Counts.same(1),
    "MLA prolog": Counts(8, 8, 11, 14),
    "indexer prolog": Counts(5, 5, 7, 9),
    "lightning indexer": Counts.same(1),
    TOP_K: Counts.same(2),
    "sparse flash attention": Counts.same(2),
    "MLA epilog": Counts(3, 3, 4, 5),
    "dense MLP": Counts(3, 3, 5, 7),
    "MoE gate": Counts(3, 4, 4, 3),  # with those that quantise and pack tokens
    "MoE experts": Counts(4, 4, 6, 6),
    "MoE shared": Counts(3, 3, 5, 7),
    "LM head": Counts.same(2),
    "other": Counts.same(28),
}
CACHE_ROWS = 2  # those of MLA's prolog that store cache rows: a product and a store

# Large products, 790 of 989 TFLOP/s, and copies, 4.3 of 4.8 TB/s, were measured on one H200.
_PRODUCT, _COPY = 0.80, 0.90
# Rows of the caches are read in pieces of 132 to 1,152 bytes; top-k reads a long row of scores more than once.
_MEMORY = {"sparse flash attention": 0.6, "lightning indexer": 0.8, TOP_K: 0.5}

# Part of the multiprocessors that a running collective holds: 20 of 132, as DeepSeek-V3's report gives them.
COLLECTIVE = 20 / 132

# Weights that a decode step brings into L2 (half of a Hopper's 50 MiB, as kernels/linear/prefetch_weights.py takes it),
# and the rate at which products read them there; the rate is assumed.
PREFETCHED, L2_BANDWIDTH = 25 << 20, 5.5e12

OWN = "stages reach parts of the peak that were estimated by reading this project's kernels: nothing was measured"
TUNED = "stages reach parts of the peak as kernels that others have published"


class _Kernels(NamedTuple):
    """What a set of kernels reaches: fractions of the peak of products, and the cost of a launch.

    Attributes:
        launch: seconds from one kernel's end to the next one's begin in a CUDA graph, and a small kernel's least time.
        eager: the same without a graph, in which the host launches each kernel.
    """

    prefill: dict[str, float]
    decode: dict[str, float]
    launch: float
    eager: float
    source: str


# This project's: estimates, from the machine code of the kernels, the bytes that they read from L2, and public figures
# of similar ones. Experts of FP8 in prefill are bound by L2 (docs/KERNELS.md).
_OWN = _Kernels(
    {"lightning indexer": 0.40, "sparse flash attention": 0.40, "MoE experts": 0.27},
    {"lightning indexer": 0.40, "sparse flash attention": 0.30, "MoE experts": 0.5},
    3.3e-6,
    6e-6,
    OWN,
)
# Sparse attention: the published 640 (prefill) and 410 TFLOP/s (decode, FP8 cache) of FlashMLA, on an H800. The others
# are assumed.
_TUNED = _Kernels(
    {"lightning indexer": 0.5, "sparse flash attention": 0.65, "MoE experts": 0.6},
    {"lightning indexer": 0.5, "sparse flash attention": 0.41, "MoE experts": 0.5},
    2e-6,
    2e-6,
    TUNED,
)


class Efficiencies:
    """Efficiencies of all stages in prefill and in decode."""

    def __init__(
        self,
        stages: dict[tuple[str, str], Efficiency],
        source: str,
        kernels: _Kernels,
        measured: Set[tuple[str, str]] = frozenset(),
    ):
        self._stages, self.source, self._kernels, self._measured = stages, source, kernels, measured

    def of(
        self, phase: str, stage: str, products: Products = "plain", eager: bool = False, copies: int = 0
    ) -> Efficiency:
        """The efficiency of a stage in "prefill" or "decode".

        Args:
            products: those of linear layers.
            eager: a decode step without a CUDA graph.
            copies: launches beside those of one rank alone.
        """
        known = self._stages.get((phase, stage), Efficiency(_PRODUCT, _COPY, 0.0))
        if stage not in KERNELS or self.has_measured(phase, stage):
            return known
        launch = self._kernels.eager if eager else self._kernels.launch
        return known._replace(fixed=(getattr(KERNELS[stage], products) + copies) * launch)

    @property
    def launch(self) -> float:
        """Seconds of a launch in a CUDA graph."""
        return self._kernels.launch

    def has_measured(self, phase: str, stage: str) -> bool:
        return (phase, stage) in self._measured

    @classmethod
    def assumed(cls, of: _Kernels = _OWN) -> Efficiencies:
        """Estimates for this project's kernels."""
        stages = {}
        for phase, compute in (("prefill", of.prefill), ("decode", of.decode)):
            for name, kernels in KERNELS.items():
                of_memory = _MEMORY.get(name, _COPY)
                stages[(phase, name)] = Efficiency(compute.get(name, _PRODUCT), of_memory, kernels.plain * of.launch)
        return cls(stages, of.source, of)

    @classmethod
    def of_tuned_kernels(cls) -> Efficiencies:
        """Those of kernels that others have tuned and published, for deployments that use them."""
        return cls.assumed(_TUNED)

    @classmethod
    def fitted(cls, entries: Sequence[Entry], device: Device, source: str) -> Efficiencies:
        """Fits fixed time and efficiency of each stage to measured runs, by relative error; stages without a run keep
        the assumptions. A single size does not determine fixed times: they are 0 then."""
        stages, measured = dict(cls.assumed()._stages), set()
        for phase in {entry.phase for entry in entries}:
            runs = [entry for entry in entries if entry.phase == phase]
            for name in {name for entry in runs for name in entry.work}:
                points = [(e.work[name], e.seconds[name]) for e in runs if name in e.work and e.seconds.get(name)]
                if points:
                    stages[(phase, name)] = _fit(points, device)
                    measured.add((phase, name))
        return cls(stages, source, _OWN, measured)


class Entry(NamedTuple):
    """A measured run: "prefill" or "decode", its counted work and the seconds of its stages."""

    phase: str
    work: Stages
    seconds: dict[str, float]


def ideal_seconds(work: Work, device: Device) -> float:
    """Seconds at the device's peaks."""
    return max(_compute(work, device), work.bytes_moved / device.bandwidth)


def stage_seconds(work: Work, device: Device, reached: Efficiency) -> tuple[float, str]:
    """Seconds, and their largest part: "compute", "bandwidth" or "launches"."""
    parts = {
        "compute": _compute(work, device) / reached.compute,
        "bandwidth": work.bytes_moved / device.bandwidth / reached.memory,
    }
    limit = max(parts, key=lambda name: parts[name])
    fixed = work.passes * reached.fixed
    return parts[limit] + fixed, "launches" if fixed > parts[limit] else limit


def _compute(work: Work, device: Device) -> float:
    return (work.flops - work.narrow_flops) / device.flops + work.narrow_flops / device.narrow_flops


def _fit(points: Sequence[tuple[Work, float]], device: Device) -> Efficiency:
    """Least squares of (passes · a + ideal · b) / seconds = 1 with a, b ≥ 0."""
    rows = [(work.passes / s, ideal_seconds(work, device) / s) for work, s in points]
    aa, ab, bb = sum(p * p for p, _ in rows), sum(p * i for p, i in rows), sum(i * i for _, i in rows)
    a_1, b_1 = sum(p for p, _ in rows), sum(i for _, i in rows)
    det = aa * bb - ab * ab
    a, b = 0.0, b_1 / bb if bb else 0.0
    if len(rows) > 1 and det > 1e-9 * aa * bb:
        both = ((a_1 * bb - b_1 * ab) / det, (b_1 * aa - a_1 * ab) / det)
        if both[1] <= 0:
            a, b = a_1 / aa, 0.0
        elif both[0] > 0:
            a, b = both
    reached = 1 / b if b > 0 else float("inf")
    return Efficiency(reached, reached, a)


def read_measured(paths: Sequence[str]) -> tuple[Ceilings, list[Entry], str]:
    """Reads the files of benchmarks: ceilings, entries, and the device's name.

    Args:
        paths: JSON files of bench_prefill.py, measure_ttft.py, measure_tpot.py or bench_kernels.py, all of one device.

    Raises:
        ValueError: another kind of file, or no ceilings in any file.
        OSError: no such file.
    """
    ceilings: Ceilings | None = None
    entries: list[Entry] = []
    names = []
    for path in paths:
        try:
            loaded = json.loads(Path(path).read_text(encoding="utf-8"))
            figures = loaded["ceilings"]
            peak = figures["peak_tflops_per_s"] if "peak_tflops_per_s" in figures else figures["matmul_tflops_per_s"]
            ceilings = Ceilings(peak * 1e12, figures["copy_gb_per_s"] * 1e9)
            names.append(loaded["device"])
            for result in loaded["results"]:
                entries += _entries(result)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{path} is no result of a benchmark with ceilings ({type(error).__name__}: {error}); give the --json "
                "of bench_prefill.py, measure_ttft.py, measure_tpot.py or bench_kernels.py"
            ) from error
    if ceilings is None:
        raise ValueError("no file with measured ceilings was given")
    if len(set(names)) > 1:
        raise ValueError(f"the files are of different devices: {', '.join(sorted(set(names)))}; give those of one")
    return ceilings, entries, names[0]


def _entries(result: dict[str, Any]) -> list[Entry]:
    """Entries of one length: its prefill and its decode step, as far as both work and stages are there."""
    stage_ms = result.get("stage_ms", {})
    by_phase = stage_ms if isinstance(stage_ms, dict) else {"prefill": stage_ms}
    entries = []
    for phase, key in (("prefill", "prefill_work"), ("decode", "decode_step")):
        ranks = by_phase.get(phase)
        if not ranks or "stages" not in result.get(key, {}):
            continue
        # Stages of decode are per token; a step gives several tokens with drafts.
        per = result.get("mean_acceptance_length") or 1.0 if phase == "decode" else 1.0
        slowest = {name: max(rank[name] for rank in ranks) * per / 1e3 for name in ranks[0]}
        work = {name: Work(**figures) for name, figures in result[key]["stages"].items()}
        entries.append(Entry(phase, work, slowest))
    return entries
