"""Committed plots show the results that lie beside them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from dsa_engine.measure.plots import DRAWN, digest, load_pyplot, save

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
# Plots with the file of their data, and what of it is drawn.
SOURCES: dict[str, tuple[str, Callable[[list[Any]], Any]]] = {
    "compare_context_parallel.png": ("compare_context_parallel.json", lambda d: d[0]["results"] + d[0]["counted"]),
    "compare_mla.png": ("compare_mla.json", lambda d: d[0]["results"]),
    "compare_transformers_cpu_2_threads.png": ("compare_transformers_cpu_2_threads.json", lambda d: d[0]["results"]),
    "retrieval.png": ("evaluation.json", lambda d: d[0]["retrieval"]),
    "training_losses.png": ("training_log.jsonl", lambda d: d[:-1]),  # the last line is about the run
}


def drawn(plot: Path) -> str | None:
    with Image.open(plot) as image:
        return image.info.get(DRAWN)


@pytest.mark.parametrize("plot", sorted(RESULTS.glob("*.png")), ids=lambda plot: plot.name)
def test_a_plot_is_of_the_results_beside_it(plot: Path) -> None:
    """Draw it again with the script that wrote the file, or name a new plot's data above."""
    name, part = SOURCES[plot.name]
    text = (RESULTS / name).read_text(encoding="utf-8")
    loaded = [json.loads(line) for line in text.splitlines()] if name.endswith(".jsonl") else [json.loads(text)]
    assert drawn(plot) == digest(part(loaded)), f"{plot.name} is not of {name}"


def test_another_run_is_another_plot(tmp_path: Path) -> None:
    """Results as they are drawn, and as a file gives them back."""
    path, results = tmp_path / "x.png", [{"seconds": [0.1, 1 / 3], "form": "CD"}]
    save(load_pyplot().figure(), str(path), results)
    assert drawn(path) == digest(json.loads(json.dumps(results)))
    assert drawn(path) != digest([{"seconds": [0.1, 1 / 3 + 1e-9], "form": "CD"}])
