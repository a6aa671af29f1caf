"""``gpu_check.sh``: its parts, their limits, and its message without a GPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


def test_gpu_check_without_a_gpu(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    env = os.environ | {"PYTHON": sys.executable}
    command = ["bash", str(SCRIPTS / "gpu_check.sh"), "all", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=env)
    assert done.returncode == 1 and done.stdout == "" and list(tmp_path.iterdir()) == []
    assert done.stderr.startswith("gpu_check.sh needs a CUDA device") and done.stderr.count("\n") == 2


PARTS = {
    "all": [
        "compile",
        "doctor",
        "kernels",
        "ttft_rank_of_64",
        "tpot_rank_of_64",
        "tests_graphs",
        "tests_kernels",
    ],
    "kernels": ["compile", "doctor", "tests_kernels", "kernels"],
    "latency": ["compile", "doctor", "tests_graphs", "ttft_rank_of_64", "tpot_rank_of_64"],
    "ranks": [
        "doctor_ranks",
        "graphs_ranks",
        "dbo_8_queues",
        "dbo_32_queues",
        "no_dbo",
        "two_machines",
        "apart",
    ],
}


@pytest.mark.parametrize("what", PARTS)
def test_gpu_check_goes_on_after_a_part_that_fails(tmp_path: Path, what: str) -> None:
    """Uses an interpreter that prints its arguments, and fails as the doctor."""
    scripts = {
        "python": 'case "$*" in *device_count*) echo 4; exit;; esac\necho "called: $*"\n'
        'case "$*" in *doctor*) exit 3;; esac',
        "unshare": 'shift 3; exec "$@"',
        "hostname": 'echo "named $1"',
    }
    for name, body in scripts.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    python, out = tmp_path / "python", tmp_path / "results"
    command = ["bash", str(SCRIPTS / "gpu_check.sh"), what, str(out)]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"PYTHON": str(python), "PATH": f"{tmp_path}:{os.environ['PATH']}"},
    )
    first = "doctor_ranks" if what == "ranks" else "doctor"
    assert re.findall(r"^== (\w+) \(at most \d+ s\)$", done.stdout, re.M) == PARTS[what]
    assert f"== {first}: exit status 3" in done.stdout and f"FAILED: {first} (" in done.stdout and done.returncode == 1
    assert sorted(path.name for path in out.iterdir()) == sorted(f"{part}.log" for part in PARTS[what])
    if what == "ranks":
        assert {"named machine0", "named machine1"} <= set((out / "two_machines.log").read_text().splitlines())
    for part in set(PARTS[what]) - {"compile"}:
        assert re.search(rf"{out}/{part}\.(json|xml)", (out / f"{part}.log").read_text()), "each leaves a result"
    limits = sum(map(int, re.findall(r"at most (\d+) s", done.stdout)))
    assert limits <= {"all": 1560, "ranks": 720}.get(what, 600)
