"""The forms of context parallelism on true ranks, by ``compare_context_parallel.py``: what a single process
computes (which ``tests/scripts/studies/test_context_parallel.py`` compares with the paper), on two ranks started by
DeepSpeed's launcher, and on four."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "scripts" / "studies" / "compare_context_parallel.py"
ROW = (128 + 16 + 32) * 4  # bytes of a token's cache row in the small size


def check(done: Any, report: Path, ranks: int, lengths: list[int]) -> None:
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(f"One layer of size small, {ranks} ranks") == 1
    results = json.loads(report.read_text())["results"]
    names = ("head-tail", "contiguous", "ulysses", "ring")
    assert [(r["length"], r["form"]) for r in results] == [(n, form) for n in lengths for form in names]
    for r in results:
        assert len(r["seconds"]) == 1 and r["relative_error"] < 1e-3, r
        if r["form"] != "ulysses":
            rows = -(-r["length"] // (2 * ranks)) * 2 if r["form"] != "contiguous" else -(-r["length"] // ranks)
            assert 0 < r["sent_bytes"] <= (ranks - 1) * rows * ROW
    even = {r["form"]: r["imbalance"] for r in results if r["length"] == max(lengths)}
    sent = {r["form"]: r["sent_bytes"] for r in results if r["length"] == max(lengths)}
    assert even["ulysses"] < 1.01 and even["contiguous"] > even["head-tail"] == even["ring"]
    assert sent["ring"] == sent["head-tail"] < sent["ulysses"] / 3


def arguments(report: Path, lengths: list[int]) -> list[object]:
    return [SCRIPT, "--size", "small", "--input-len", ",".join(map(str, lengths)), "--repeat", 1, "--json", report]


def test_two_ranks_started_by_deepspeed(deepspeed: Callable[..., Any], tmp_path: Path) -> None:
    """The launcher also passes ``--local_rank``, which no script declares. With a sequence of one token, one rank has
    none."""
    report, lengths = tmp_path / "cp.json", [1, 515]
    check(deepspeed(2, *arguments(report, lengths)), report, 2, lengths)


@pytest.mark.slow
def test_four_ranks(torchrun: Callable[..., Any], tmp_path: Path) -> None:
    report, lengths = tmp_path / "cp.json", [3, 64, 777, 2051]
    check(torchrun(4, *arguments(report, lengths)), report, 4, lengths)
