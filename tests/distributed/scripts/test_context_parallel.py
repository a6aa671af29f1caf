"""The forms of context parallelism on true ranks, by ``compare_context_parallel.py``: what a single process
computes (which ``tests/scripts/studies/test_context_parallel.py`` compares with the papers'), as many bytes and as much
work as the formulas say. On two ranks started by DeepSpeed's launcher."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "scripts" / "studies" / "compare_context_parallel.py"


def check(report: Path, ranks: int, lengths: list[int], forms: tuple[str, ...]) -> None:
    result = json.loads(report.read_text())
    assert result["world_size"] == ranks
    assert [(r["length"], r["form"]) for r in result["results"]] == [(n, form) for n in lengths for form in forms]
    for r in result["results"]:
        what = f"{r['form']} at {r['length']}"
        assert len(r["seconds"]) == 1 and r["ranks"] == ranks
        assert r["relative_error"] < 1e-3 and r["median_row_error"] < 1e-5, what
        assert r["sent_bytes"] == r["sent_bytes_by_formula"] > 0, what
        assert r["imbalance"] == pytest.approx(r["imbalance_by_formula"]), what
    even = {r["form"]: r["imbalance"] for r in result["results"] if r["length"] == max(lengths)}
    assert even["ulysses"] < 1.01 and even["contiguous"] > even["head-tail"]
    assert {c["form"] for c in result["counted"]} == set(forms)


def arguments(report: Path, lengths: list[int]) -> list[object]:
    lens = ",".join(map(str, lengths))
    return [SCRIPT, "--size", "small", "--seq-len", lens, "--repeat", 1, "--counted-len", 4096, "--json", report]


def test_two_ranks_started_by_deepspeed(deepspeed: Callable[..., Any], tmp_path: Path) -> None:
    """The launcher also passes ``--local_rank``, which no script declares. With a sequence of one token, one rank has
    none."""
    report, lengths = tmp_path / "cp.json", [1, 515]
    done = deepspeed(2, *arguments(report, lengths))
    assert done.returncode == 0, done.stderr
    check(report, 2, lengths, ("head-tail", "contiguous", "ulysses", "ring"))
    assert done.stdout.count("Measured, one layer of size small, 2 ranks") == 1


@pytest.mark.slow
def test_four_ranks(torchrun: Callable[..., Any], tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    report, lengths = tmp_path / "cp.json", [3, 64, 777, 2051]
    done = torchrun(4, *arguments(report, lengths))
    assert done.returncode == 0, done.stderr
    check(report, 4, lengths, ("head-tail", "contiguous", "ulysses", "ring"))


@pytest.mark.slow
def test_ranks_that_cannot_divide_the_heads_leave_ulysses_out(torchrun: Callable[..., Any], tmp_path: Path) -> None:
    report = tmp_path / "cp.json"
    done = torchrun(3, *arguments(report, [2, 500]))
    assert done.returncode == 0, done.stderr
    names = [r["form"] for r in json.loads(report.read_text())["results"]]
    assert names == ["head-tail", "contiguous", "ring"] * 2
    assert "left out: ulysses divides heads, and 16 heads cannot be divided evenly over 3 ranks" in done.stdout
    done = torchrun(3, *arguments(report, [2]), "--forms", "ulysses")
    assert done.returncode != 0
    assert done.stderr.count("error: ulysses divides heads, and 16 heads cannot be divided evenly over 3 ranks") == 1
