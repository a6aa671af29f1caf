"""Our kernel in Gluon behind its operation: what it takes, its trial in a process of its own, and what runs where that
fails."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dsa_engine.kernels.attention import sparse_attention as operation_file
from dsa_engine.kernels.attention.sparse_attention import sparse_attention, sparse_attention_reference
from dsa_engine.kernels.formats.cache_format import FP8, latent_format
from dsa_engine.kernels.libraries import gluon
from dsa_engine.kernels.runtime import launch, libraries, operation
from dsa_engine.kernels.runtime.libraries import ADAPTERS
from dsa_engine.kernels.runtime.operation import Comparison, compared

ROWS = latent_format(512, 64, torch.bfloat16)
MANY = {"sparse_attention, many rows": gluon.NAME}
ran: list[str] = []


@pytest.fixture
def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q, pool, slots = gluon.trial_inputs(64, 128, torch.device("cpu"))
    return q[95:165], pool, slots[95:165]


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """CPU tensors are served as those of a Hopper GPU; the kernel is its reference, and faster than ours."""

    def kernel(q: torch.Tensor, pool: torch.Tensor, slots: torch.Tensor, scale: float) -> Any:
        ran.append("Gluon")
        return sparse_attention_reference(q, pool, slots, None, ROWS, scale, 1 << 20)

    def milliseconds(run: Callable[[], Any]) -> float:
        ran.clear()
        run()
        return 1.0 if ran else 2.0

    monkeypatch.setattr(gluon, "INTERPRETED", False)
    monkeypatch.setattr(gluon, "sparse_prefill_sm90", SimpleNamespace(sparse_prefill=kernel))
    monkeypatch.setattr(operation_file, "runs_triton", lambda x: False)
    monkeypatch.setattr(libraries, "_serves", lambda x: True)
    monkeypatch.setattr(libraries, "milliseconds", milliseconds)
    monkeypatch.setattr(gluon, "_TRIAL_S", 20.0)
    gluon._fault_of.cache_clear()
    with launch.compiling_for(90):
        yield
    libraries.use({})
    gluon._fault_of.cache_clear()


@pytest.mark.parametrize(
    ("trial", "seconds", "reason"),
    [
        ("assert ({}, {}, {}) == (-1, 64, 128)", 60.0, ""),
        ("import time; time.sleep(600)", 0.5, "its trial in a process of its own did not end within 0.5 s"),
        ("raise SystemExit('the output differs')", 60.0, "its trial ended with 1: the output differs"),
        ("import os; os.abort()", 60.0, "its trial ended with -6: "),
    ],
    ids=["right", "hangs", "wrong", "aborts"],
)
def test_a_trial_decides(
    on_hopper: None, inputs: Any, trial: str, seconds: float, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gluon, "_TRIAL", trial)
    monkeypatch.setattr(gluon, "_TRIAL_S", seconds)
    comparison = Comparison()
    with compared(comparison):
        wanted = sparse_attention(*inputs, row_format=ROWS, scale=0.04)
    name = f"{gluon.NAME} (many rows)"
    assert comparison.wrong == {} and operation.replaced() == {}
    assert comparison.rejected.get(name, "") == (reason and f"RuntimeError: {reason}")
    assert libraries.choices() == ({} if reason else MANY)
    ran.clear()
    for mine, theirs in zip(sparse_attention(*inputs, row_format=ROWS, scale=0.04), wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-2, atol=1e-3)
    assert ran == [] if reason else ran == ["Gluon"]


def test_a_stored_choice_needs_no_trial(on_hopper: None, inputs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", None)
    libraries.use(MANY)
    ran.clear()
    sparse_attention(*inputs, row_format=ROWS, scale=0.04)
    assert ran == ["Gluon"]
    sparse_attention(*(x[:64] if x is not inputs[1] else x for x in inputs), row_format=ROWS, scale=0.04)
    with launch.compiling_for(100):
        sparse_attention(*inputs, row_format=ROWS, scale=0.04)
    assert ran == ["Gluon"], "few rows and other chips have Triton's kernel"


def test_calls_that_it_takes(on_hopper: None, inputs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    takes, (q, pool, slots) = ADAPTERS[gluon.NAME].takes, inputs
    other = latent_format(512, 64, FP8), latent_format(576, 0, torch.bfloat16), latent_format(512, 64, torch.float16)
    assert takes(q, pool, slots, row_format=ROWS, scale=1.0)
    assert takes(q, pool, slots.repeat(1, 3), row_format=ROWS, scale=1.0)
    assert not takes(q, pool, slots.repeat(1, 64), row_format=ROWS, scale=1.0)
    assert not takes(q, pool, slots[:, :64], row_format=ROWS, scale=1.0)
    assert not takes(q[:, :32], pool, slots, row_format=ROWS, scale=1.0)
    assert not takes(q[:64], pool, slots[:64], row_format=ROWS, scale=1.0)
    assert not takes(q, pool, slots, row_format=ROWS, counts=slots[:, 0], scale=1.0)
    assert not any(takes(q, pool, slots, row_format=each, scale=1.0) for each in other)
    for chip in (80, 89, 100, 120):
        with launch.compiling_for(chip):
            assert not takes(q, pool, slots, row_format=ROWS, scale=1.0)
    monkeypatch.setattr(gluon, "INTERPRETED", True)  # there is no interpreter for Gluon
    assert not takes(q, pool, slots, row_format=ROWS, scale=1.0)


@pytest.mark.parametrize("change", ["sys.modules['triton.experimental.gluon'] = None", "del hopper.warpgroup_mma"])
def test_another_triton(change: str) -> None:
    """Without Gluon, or with another one, the package is imported and the adapter takes nothing."""
    lines = ["import sys", change, "from dsa_engine.kernels.libraries import gluon", "print(gluon.sparse_prefill_sm90)"]
    if "hopper" in change:
        pytest.importorskip("triton.experimental.gluon")
        lines.insert(1, "from triton.experimental.gluon.language.nvidia import hopper")
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, timeout=120)
    assert done.stdout == "None\n", done.stderr
