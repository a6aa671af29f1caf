"""Rank 0 serves threads and event loops, and the other ranks follow."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from callers import Kind, check_found, make_kinds
from dsa_engine import LLM

Launch = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def kinds(demo_random: LLM) -> list[Kind]:
    return make_kinds(demo_random, 30, longest=90)


@pytest.fixture(scope="module")
def serving(torchrun: Launch, fork_ranks: Launch, kinds: list[Kind], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """``serving(how, ranks, requests, tasks)``: the finished process, and the file of its results."""

    def run(how: str, ranks: int, *sizes: int) -> tuple[subprocess.CompletedProcess[str], Path]:
        folder = tmp_path_factory.mktemp("serving")
        (folder / "kinds.json").write_text(json.dumps(kinds))
        result = folder / "results.json"
        launch = fork_ranks if how == "load" else torchrun
        done = launch(ranks, "serving.py", how, folder / "kinds.json", result, *sizes, timeout=500)
        print(done.stdout, done.stderr)
        return done, result

    return run


@pytest.mark.parametrize(
    "ranks, requests, tasks",
    [
        (4, 60, 20),
        pytest.param(2, 60, 20, marks=pytest.mark.slow),
        pytest.param(4, 2000, 500, marks=pytest.mark.slow),
    ],
)
def test_tokens_are_those_of_one_process(
    serving: Any, demo_random: LLM, kinds: list[Kind], ranks: int, requests: int, tasks: int
) -> None:
    done, path = serving("load", ranks, requests, tasks)
    assert done.returncode == 0, done.stderr
    for rank in range(1, ranks):
        assert f"rank {rank} is done, True" in done.stdout
    result = json.loads(path.read_text())
    assert len(result["found"]) + result["cancelled"] == requests + tasks
    check_found(result["found"], kinds)
    assert sum(how != "left" for *_, how in result["found"]) > requests // 2 and 0 < result["cancelled"] < tasks
    assert result["pages_lost"] == 0
    logits = torch.tensor(result["logits"])
    assert torch.allclose(logits, demo_random.prompt_logits([5, 6, 7]), atol=1e-4)


@pytest.mark.parametrize("how", ["killed", "killed idle"])
def test_a_rank_that_is_killed_ends_the_run(serving: Any, how: str) -> None:
    """Killed during steps, and while there is nothing to do."""
    done, path = serving(how, 4, 40, 10)
    assert done.returncode != 0 and not path.exists()
    assert "rank      : 2 (local_rank: 2)" in done.stderr.split("Root Cause")[1], "torchrun's report names it"
