"""How tests start several processes: ``torchrun`` on this machine, Gloo, a free port."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def torchrun() -> Callable[..., subprocess.CompletedProcess[str]]:
    """``torchrun(ranks, script, *arguments, timeout=300)``: the finished launch with what it printed."""

    def launch(ranks: int, script: str, *arguments: object, timeout: float = 300) -> subprocess.CompletedProcess[str]:
        environment = {
            key: value
            for key, value in os.environ.items()
            if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
        }
        environment |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        process = subprocess.Popen(
            [*command, str(HERE / script), *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=HERE.parents[1],
            start_new_session=True,
        )
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 15)  # torchrun ends its ranks
            out, err = process.communicate(timeout=60)
            pytest.fail(f"still running after {timeout} s\n{out}\n{err}")
        return subprocess.CompletedProcess(command, process.returncode, out, err)

    return launch


@pytest.fixture(scope="session")
def worker() -> ModuleType:
    """The worker script as a module, to run the same in this process."""
    spec = importlib.util.spec_from_file_location("distributed_worker", HERE / "worker.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
