"""Ways to start several ranks on this machine: ``torchrun``, ``deepspeed``, and forking, which is faster."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from recipes import int4_checkpoint

HERE = Path(__file__).parent
PROGRAMS = HERE / "programs"


Launch = Callable[..., "subprocess.CompletedProcess[str]"]


def environment() -> dict[str, str]:
    """The environment of a launcher, without the variables of a run that this process may be part of."""
    of_a_run = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    own = {key: value for key, value in os.environ.items() if key not in of_a_run}
    paths = filter(None, (str(HERE.parent / "support"), own.get("PYTHONPATH")))
    own |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return own | {"PYTHONPATH": os.pathsep.join(paths)}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]  # free again when the server is closed


def launch_with(launcher: list[str], script: str, *arguments: object, timeout: float = 300) -> Any:
    """Runs a launcher on a script; returns the finished process with its output."""
    process = subprocess.Popen(
        [*launcher, str(PROGRAMS / script), *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
        cwd=HERE.parents[1],
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 15)  # the launcher ends its ranks
        out, err = process.communicate(timeout=60)
        pytest.fail(f"still running after {timeout} s\n{out}\n{err}")
    return subprocess.CompletedProcess(launcher, process.returncode, out, err)


@pytest.fixture(scope="session")
def fork_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launch]:
    """``fork_ranks(ranks, script, *arguments, timeout=300, stdin=None)``: the finished ranks, with their output, and
    ``codes``, the status of each. ``store``: port of a store that outlives them; default: rank 0 has it.

    They are forks of a process that has imported PyTorch, as starting Python takes seconds.
    """
    command = [sys.executable, str(PROGRAMS / "rank_server.py")]
    folder, numbers = tmp_path_factory.mktemp("ranks"), itertools.count()
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment(), start_new_session=True
    ) as server:
        assert server.stdin is not None and server.stdout is not None
        assert server.stdout.readline() == "ready\n"

        def launch(
            ranks: int,
            script: str,
            *arguments: object,
            timeout: float = 300,
            stdin: str | None = None,
            store: int | None = None,
        ) -> subprocess.CompletedProcess[str]:
            number = next(numbers)
            files = {name: folder / f"{number}.{name}" for name in ("stdin", "out", "err")}
            files["stdin"].write_text(stdin or "")
            where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store or free_port())}
            where |= {"TORCHELASTIC_USE_AGENT_STORE": "True"} if store else {}
            described = {
                "ranks": ranks,
                "script": str(PROGRAMS / script),
                "arguments": [*map(str, arguments)],
                "environment": environment() | where,
            }
            server.stdin.write(json.dumps(described | {name: str(path) for name, path in files.items()}) + "\n")
            server.stdin.flush()
            ended = select.select([server.stdout], [], [], timeout)[0]
            codes = json.loads(server.stdout.readline()) if ended else []
            out, err = (files[name].read_text() if files[name].exists() else "" for name in ("out", "err"))
            if not ended:
                for number in (signal.SIGTERM, signal.SIGKILL):
                    os.killpg(server.pid, number)
                    time.sleep(2)  # in which an agent ends its ranks
                pytest.fail(f"still running after {timeout} s\n{out}\n{err}")
            done = subprocess.CompletedProcess(command, max(map(abs, codes)), out, err)
            done.codes = codes
            return done

        yield launch
        server.stdin.close()


@pytest.fixture(scope="session")
def torchrun(fork_ranks: Launch) -> Launch:
    """Like ``fork_ranks``, with PyTorch's launcher between: it starts, watches and ends the ranks (agent.py)."""

    def launch(ranks: int, script: str, *arguments: object, **how: Any) -> subprocess.CompletedProcess[str]:
        return fork_ranks(1, "agent.py", ranks, PROGRAMS / script, *arguments, **how)

    return launch


@pytest.fixture(scope="session")
def rank_results(fork_ranks: Launch) -> Callable[..., list[Any]]:
    """``rank_results(ranks, script, cases, folder, timeout=300)``: what each rank saved, when a script has run the
    cases."""

    def run(ranks: int, script: str, cases: Any, folder: Path, timeout: float = 300) -> list[Any]:
        (folder / "cases.json").write_text(json.dumps(cases))
        done = fork_ranks(ranks, script, folder / "cases.json", folder, timeout=timeout)
        assert done.returncode == 0, done.stderr
        return [torch.load(folder / f"rank{rank}.pt") for rank in range(ranks)]

    return run


@pytest.fixture(scope="session")
def deepspeed() -> Launch:
    """Like ``torchrun``, with DeepSpeed's launcher and new processes; skips the test if that is not installed."""
    if importlib.util.find_spec("deepspeed") is None:
        pytest.skip("DeepSpeed is not installed")

    def launch(ranks: int, script: str, *arguments: object, timeout: float = 300) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", str(ranks)]
        return launch_with([*command, "--master_port", str(free_port())], script, *arguments, timeout=timeout)

    return launch


@pytest.fixture(scope="session")
def int4_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny checkpoint of the recipe with INT4 experts."""
    return int4_checkpoint(tmp_path_factory.mktemp("int4"))


@pytest.fixture(scope="session")
def program() -> Callable[[str], dict[str, Any]]:
    """The names of a script, to run its cases in this process."""
    return lambda script: runpy.run_path(str(PROGRAMS / script))


@pytest.fixture(scope="session")
def worker(program: Callable[[str], dict[str, Any]]) -> SimpleNamespace:
    """The names of the worker script."""
    return SimpleNamespace(**program("worker.py"))
