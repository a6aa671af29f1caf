"""With ``batch_invariant`` the logits after the same tokens are the same bits however they are computed: alone or in a
batch, in chunks of any size, on any number of ranks, with drafts, hits, preemption, replicas, micro-batches, padding.

Without it they differ, and the largest difference is printed (``-s``).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bits import (
    AXES,
    AXIS_FORMATS,
    FORMATS,
    LENGTHS,
    MODELS,
    along,
    drawn,
    finished,
    largest_difference,
    reference,
    without_the_option,
)
from dsa_engine.demo.random_checkpoint import write_random_checkpoint
from dsa_engine.kernels.runtime import cpu
from dsa_engine.weights.convert import quantize_checkpoint

pytestmark = pytest.mark.skipif(cpu.library() is None, reason="no C++ compiler, or DSA_ENGINE_NATIVE=0")


class Runs:
    """Runs cases on their ranks, next to each request alone on one rank."""

    def __init__(
        self,
        config: dict[str, Any],
        ids: Callable[..., list[int]],
        worker: SimpleNamespace,
        rank_results: Callable[..., list[Any]],
        folder: Path,
    ):
        self._config, self._worker, self._rank_results, self._folder = config, worker, rank_results, folder
        self._ids = [ids(length, 204, seed=length) for length in LENGTHS]

    def model(self, model: str, format: str) -> str:
        """The folder of a model, as ``quantize_checkpoint`` stores it; written once."""
        quantize = FORMATS[format][0]
        plain, stored = (self._folder / f"{model} {name}" for name in (None, quantize))
        if not plain.exists():
            write_random_checkpoint(plain, self._config | {"model_type": model} | MODELS[model], fp8=False)
        if quantize is not None and not stored.exists():
            quantize_checkpoint(plain, stored, quantize)
        return str(stored)

    def difference(self, cases: list[dict[str, Any]], on: bool) -> dict[str, tuple[float, int, int]]:
        """What :func:`largest_difference` gives for each case beside each of its requests alone, by its name."""
        kinds = sorted({(case["model"], case["format"]) for case in cases})
        alone = {}
        for kind in kinds:
            alone[kind] = self._worker.run_case(finished(reference(*kind), self.model(*kind), self._ids, [], on))
        results: dict[str, list[Any]] = {}
        by_world = defaultdict(list)
        for case in cases:
            kind = case["model"], case["format"]
            tokens = [one[0] for one in alone[kind]["tokens"]]
            by_world[case["world"]].append(finished(case, self.model(*kind), self._ids, tokens, on))
        for world, ready in by_world.items():
            folder = self._folder / f"world {world} {on}"
            folder.mkdir()
            for rank in self._rank_results(world, "worker.py", ready, folder):
                for name, result in rank.items():
                    results.setdefault(name, []).append(result["bits"])
        return {
            case["name"]: largest_difference([alone[case["model"], case["format"]]["bits"], *results[case["name"]]])
            for case in cases
        }


@pytest.fixture
def runs(
    base_config: dict[str, Any],
    random_ids: Callable[..., list[int]],
    worker: SimpleNamespace,
    rank_results: Callable[..., list[Any]],
    tmp_path: Path,
) -> Runs:
    return Runs(base_config, random_ids, worker, rank_results, tmp_path)


def assert_same_bits(measured: dict[str, tuple[float, int, int]], cases: list[dict[str, Any]]) -> None:
    for case in cases:
        largest, different, compared = measured[case["name"]]
        assert compared > 0, case
        assert different == 0, f"{different} of {compared} rows differ, by up to {largest}: {case}"


def test_random_ways(runs: Runs) -> None:
    cases = drawn(14, seed=0)
    assert_same_bits(runs.difference(cases, True), cases)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 12))
def test_more_random_ways(runs: Runs, seed: int) -> None:
    """300 and more of all seeds; the largest difference without the option is printed for the first."""
    cases = drawn(28, seed)
    if seed == 1:
        without = runs.difference(without_the_option(cases), False)
        print(f"without the option: up to {max(measured[0] for measured in without.values()):.1e}")
    assert_same_bits(runs.difference(cases, True), cases)


@pytest.mark.slow
def test_what_may_differ(runs: Runs) -> None:
    """The table of docs/DETERMINISM.md, printed."""
    cases = [along(axis, format) for axis in AXES for format in AXIS_FORMATS]
    without, measured = runs.difference(without_the_option(cases), False), runs.difference(cases, True)
    for axis in AXES:
        shown = []
        for formats in (AXIS_FORMATS[:1], AXIS_FORMATS[1:]):
            names = [f"{axis}, {format}" for format in formats]
            largest = max(without[name][0] for name in names if name in without)
            different = any(without[name][1] for name in names if name in without)
            shown.append(f"{largest:.0e}" if different else "same bits")
        print("|", " | ".join((axis, *shown, "same bits")), "|")
    assert_same_bits(measured, cases)
