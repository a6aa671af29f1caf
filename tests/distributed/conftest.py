"""How tests start several processes: ``torchrun`` or ``deepspeed`` on this machine, Gloo, a free port."""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

HERE = Path(__file__).parent


Launch = Callable[..., "subprocess.CompletedProcess[str]"]


def launch_with(
    launcher: list[str], script: str, *arguments: object, timeout: float = 300, stdin: str | None = None
) -> Any:
    """The finished launch of a script with what it printed."""
    environment = {
        key: value
        for key, value in os.environ.items()
        if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    }
    environment |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    process = subprocess.Popen(
        [*launcher, str(HERE / script), *map(str, arguments)],
        stdin=None if stdin is None else subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        cwd=HERE.parents[1],
        start_new_session=True,
    )
    try:
        out, err = process.communicate(stdin, timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 15)  # the launcher ends its ranks
        out, err = process.communicate(timeout=60)
        pytest.fail(f"still running after {timeout} s\n{out}\n{err}")
    return subprocess.CompletedProcess(launcher, process.returncode, out, err)


@pytest.fixture(scope="session")
def torchrun() -> Launch:
    """``torchrun(ranks, script, *arguments, timeout=300, stdin=None)``: the finished launch with what it printed."""

    def launch(ranks: int, script: str, *arguments: object, **how: Any) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        return launch_with(command, script, *arguments, **how)

    return launch


@pytest.fixture(scope="session")
def deepspeed() -> Launch:
    """The same with DeepSpeed's launcher; skips where that is not installed."""
    if importlib.util.find_spec("deepspeed") is None:
        pytest.skip("DeepSpeed is not installed")

    def launch(ranks: int, script: str, *arguments: object, timeout: float = 300) -> subprocess.CompletedProcess[str]:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]  # free again when the server is closed
        command = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", str(ranks)]
        return launch_with([*command, "--master_port", str(port)], script, *arguments, timeout=timeout)

    return launch


@pytest.fixture(scope="session")
def worker() -> ModuleType:
    """The worker script as a module, to run the same in this process."""
    spec = importlib.util.spec_from_file_location("distributed_worker", HERE / "worker.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
