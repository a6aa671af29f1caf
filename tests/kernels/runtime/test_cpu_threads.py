"""The threads of the CPU's kernels: they change no result, serve several callers, and a child process has its own."""

from __future__ import annotations

import os
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from dsa_engine.kernels.linear.linear import linear
from dsa_engine.kernels.rows.silu_mul import silu_mul
from dsa_engine.kernels.runtime import cpu
from dsa_engine.kernels.runtime.launch import INTERPRETED

pytestmark = pytest.mark.skipif(
    INTERPRETED or not cpu.serves(torch.empty(0)), reason="no kernels of the CPU's own, or the interpreter's turn"
)

X, WEIGHT = (torch.randn(n, 96, generator=torch.Generator().manual_seed(n)) for n in (8, 500))
GATES = torch.randn(700, 64, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def alone() -> tuple[torch.Tensor, torch.Tensor]:
    return linear(X, WEIGHT), silu_mul(GATES)


@pytest.fixture
def threads(alone: object, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of threads of an operation, one after the other; also more than there are cores."""
    given = [2, 5, 3]
    monkeypatch.setattr(cpu, "threads_for", lambda work: given[0])
    return given


def test_they_change_nothing(alone: tuple[torch.Tensor, torch.Tensor], threads: list[int]) -> None:
    while threads:
        for _ in range(200):
            assert torch.equal(linear(X, WEIGHT), alone[0])
        assert torch.equal(silu_mul(GATES), alone[1])
        del threads[0]


def test_several_callers_at_once(alone: tuple[torch.Tensor, torch.Tensor], threads: list[int]) -> None:
    def call(number: int) -> bool:
        return all(
            torch.equal(linear(X, WEIGHT), alone[0]) and torch.equal(silu_mul(GATES), alone[1]) for _ in range(50)
        )

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(call, range(8)))


def test_a_child_process_has_its_own(alone: tuple[torch.Tensor, torch.Tensor], threads: list[int]) -> None:
    linear(X, WEIGHT)  # this process has them
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons warn of forking with threads
        child = os.fork()
    if child == 0:
        same = False
        try:
            same = all(torch.equal(linear(X, WEIGHT), alone[0]) for _ in range(20))
        finally:
            os._exit(0 if same else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert torch.equal(linear(X, WEIGHT), alone[0])
