"""``bench_disaggregated.py``: both passes send the same decoding requests, each load has its own figures."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dsa_engine import LLM
from dsa_engine.commands.bench.serving.datasets import GeneratedSharedPrefix, RandomPrompts
from dsa_engine.commands.bench.serving.load import ServingLoad
from dsa_engine.commands.bench.serving.side_by_side import measure_side_by_side
from dsa_engine.errors import CapacityError

SIZES = {
    "max-model-len": 200,
    "cache-memory": "8MB",
    "num-prompts": 2,
    "input-len": 7,
    "output-len": 3,
    "num-long": 2,
    "long-input-len": 40,
    "long-output-len": 1,
}


def test_bench_disaggregated(run: Callable[..., Any], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    report, plot = tmp_path / "long.json", tmp_path / "long.png"
    sizes = [word for name, size in SIZES.items() for word in (f"--{name}", size)]
    files = ["--json", report, "--plot", plot]
    done = run("bench_disaggregated.py", "--model", "demo-random", *sizes, "--request-rate", 50, *files)
    assert done.returncode == 0, done.stderr
    results = json.loads(report.read_text())["results"]
    assert {name: list(loads) for name, loads in results.items()} == {
        "one engine, alone": ["decoding"],
        "one engine": ["decoding", "long"],
    }
    for loads in results.values():
        decoding = loads["decoding"]
        assert (decoding["completed"], decoding["failed"], decoding["max_concurrent_requests"]) == (2, 0, 2)
        assert [(r["input_len"], r["output_len"]) for r in decoding["requests"]] == [(7, 3)] * 2
        assert all(len(r["itl"]) == 2 for r in decoding["requests"])
    long = results["one engine"]["long"]
    assert [(r["input_len"], r["output_len"], r["tpot"]) for r in long["requests"]] == [(40, 1, None)] * 2
    assert long["total_cached_tokens"] == 0, "no request may use the rows of another"
    assert "decoding requests, one engine          ITL" in done.stdout and plot.stat().st_size > 1000


def test_loads_that_are_refused(tiny_llm: Callable[..., LLM]) -> None:
    with tiny_llm(200) as llm:
        with pytest.raises(ValueError, match="conversations of several turns; requests here have one"):
            measure_side_by_side(llm, {"turns": ServingLoad(GeneratedSharedPrefix(1, 1, 4, 2, 3, num_turns=2))})
        with pytest.raises((ValueError, CapacityError), match="300 tokens"):
            measure_side_by_side(llm, {"long": ServingLoad(RandomPrompts(1, 300, 4))})
