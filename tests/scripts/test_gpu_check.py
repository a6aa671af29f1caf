"""``gpu_check.sh`` and ``gpu_15.sh``: their parts, their limits, what is left when they are cut off, and their message
without a GPU. The interpreter prints its arguments."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest
import torch

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


@pytest.mark.parametrize(("script", "what"), [("gpu_check.sh", "all"), ("gpu_15.sh", "first")])
def test_without_a_gpu(tmp_path: Path, script: str, what: str) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    env = os.environ | {"PYTHON": sys.executable}
    command = ["bash", str(SCRIPTS / script), what, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=env)
    assert done.returncode == 1 and done.stdout == "" and list(tmp_path.iterdir()) == []
    assert done.stderr.startswith(f"{script} needs a CUDA device") and done.stderr.count("\n") == 2


def run(tmp_path: Path, script: str, what: str, fails: str, gpus: int = 4) -> subprocess.Popen[str]:
    """Starts the script; a part's limit is 4 seconds. A part with ``fails`` among its arguments fails, and TPOT hangs
    if the file ``hang`` exists."""
    scripts = {
        "python": f'case "$*" in *device_count*) echo {gpus} 90; exit;; esac\necho "called: $*"\n'
        f'case "$*" in *{fails}*) exit 3;; *measure_tpot*) [ ! -e {tmp_path}/hang ] || sleep 60;; esac',
        "unshare": 'while [ "${1#--}" != "$1" ]; do shift; done; exec "$@"',
        "hostname": 'echo "named $1"',
        "timeout": 'while [ "${1#--}" != "$1" ]; do shift; done; shift; exec /usr/bin/timeout -k 1 4 "$@"',
    }
    for name, body in scripts.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    return subprocess.Popen(
        ["bash", str(SCRIPTS / script), what, str(tmp_path / "results")],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ
        | {"PYTHON": f"{tmp_path}/python", "PATH": f"{tmp_path}:{os.environ['PATH']}", "TMPDIR": str(tmp_path)},
    )


PARTS = {
    "all": ["compile", "doctor", "kernels", "ttft_rank_of_64", "tpot_rank_of_64", "tests_graphs", "tests_kernels"],
    "kernels": ["compile", "doctor", "tests_kernels", "kernels"],
    "latency": ["compile", "doctor", "tests_graphs", "ttft_rank_of_64", "tpot_rank_of_64"],
    "ranks": [
        *("one_process", "compare", "doctor_ranks", "graphs_ranks"),
        *("enable-dbo", "no-enable-dbo", "two_machines", "apart"),
    ],
}


@pytest.mark.parametrize("what", PARTS)
def test_gpu_check_goes_on_after_a_part_that_fails(tmp_path: Path, what: str) -> None:
    process = run(tmp_path, "gpu_check.sh", what, "doctor")
    out, (text, _) = tmp_path / "results", process.communicate(timeout=120)
    first = "doctor_ranks" if what == "ranks" else "doctor"
    assert re.findall(r"^== ([\w-]+) \(at most \d+ s\)$", text, re.M) == PARTS[what]
    assert f"== {first}: exit status 3" in text and f"FAILED: {first} (" in text and process.returncode == 1
    assert sorted(path.name for path in out.iterdir()) == sorted(f"{part}.log" for part in PARTS[what])
    if what == "ranks":
        for part in ("two_machines", "compare"):
            assert {"named machine0", "named machine1"} <= set((out / f"{part}.log").read_text().splitlines())
    for part in set(PARTS[what]) - {"compile"}:
        result = "one_process" if part == "compare" else part
        assert re.search(rf"{out}/{result}\.(json|xml)", (out / f"{part}.log").read_text()), "each leaves a result"
    limits = sum(map(int, re.findall(r"at most (\d+) s", text)))
    assert limits <= {"all": 1560, "ranks": 780}.get(what, 600)


def test_one_gpu_is_enough_for_ranks(tmp_path: Path) -> None:
    text, _ = run(tmp_path, "gpu_check.sh", "ranks", "nothing", gpus=1).communicate(timeout=120)
    assert re.findall(r"^== (\w+) \(at most \d+ s\)$", text, re.M) == ["one_process", "compare"]
    assert text.count("called: scripts/check_ranks.py") == 1 + 2 * 4, "prefill apart in processes of its own"


FIRST = ["environment", "one_process", "kernels", "variants", "tpot_4", "ttft_4", "tests", "ranks"]


def archived(tmp_path: Path) -> set[str]:
    with tarfile.open(tmp_path / "results" / "results.tar.gz") as archive:
        return {Path(name).stem for name in archive.getnames() if name.endswith(".log")}


def test_gpu_15(tmp_path: Path) -> None:
    """A part that hangs and one that fails end no other; the second call runs them again."""
    (tmp_path / "hang").touch()
    process = run(tmp_path, "gpu_15.sh", "first", "bench_kernels", gpus=1)
    text, _ = process.communicate(timeout=120)
    began = dict(re.findall(r"^== (\w+) \(at most (\d+) s\)$", text, re.M))
    assert [part for part in began if part != "compile"] == FIRST, "which runs beside the first ones"
    assert sum(int(seconds) for part, seconds in began.items() if part != "compile") <= 480
    assert process.returncode == 1 and "FAILED: kernels variants tpot_4\n" in text
    assert archived(tmp_path) == {"compile", *FIRST} and len(list((tmp_path / "results").iterdir())) <= 8
    (tmp_path / "hang").unlink()
    process = run(tmp_path, "gpu_15.sh", "second", "nothing", gpus=1)
    text, _ = process.communicate(timeout=120)
    began = dict(re.findall(r"^== (\w+) \(at most (\d+) s\)$", text, re.M))
    assert [*began] == ["launches", "tpot_8", "ttft_8", "depths", "stress", "scores", "kernels", "variants", "tpot_4"]
    assert process.returncode == 0 and archived(tmp_path) == {"compile", *FIRST, *began}
    assert sum(map(int, began.values())) <= 180 + 45 + 160, "of what failed there is seldom much"
    assert "== depths" in (tmp_path / "results" / "summary.txt").read_text()


def test_gpu_15_cut_off(tmp_path: Path) -> None:
    (tmp_path / "hang").touch()
    process = run(tmp_path, "gpu_15.sh", "first", "nothing", gpus=1)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("== tpot_4"):
            break
    process.kill()
    process.wait()
    time.sleep(0.1)
    assert {"environment", "one_process", "kernels"} <= archived(tmp_path)
    process.stdout.close()
