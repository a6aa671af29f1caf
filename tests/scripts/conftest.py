"""Fixtures that run a script: in this process, or in a separate one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
Run = Callable[..., Any]


def with_model(script: str, arguments: tuple[object, ...]) -> list[object]:
    """Adds the random model, whose shapes the tests know, if a script measures a model and none is named."""
    measures = Path(script).name.startswith(("bench_prefill", "measure_t", "compare_"))
    return [*arguments] if not measures or "--model" in arguments else [*arguments, "--model", "demo-random"]


@pytest.fixture
def run(run_script: Run) -> Run:
    """Runs a script in this process."""
    return lambda script, *arguments: run_script(script, *with_model(script, arguments))


@pytest.fixture
def run_alone(demo_cache: Path) -> Run:
    """Runs a script in a separate process, to measure the memory of a process."""

    def start(script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(SCRIPTS / script), *map(str, with_model(script, arguments))]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        return subprocess.run(command, capture_output=True, text=True, timeout=900, env=environment)

    return start
