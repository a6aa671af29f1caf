"""Operations that run both ways, and the replacement of a kernel that is wrong."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from dsa_engine.kernels.runtime import launch, operation
from dsa_engine.kernels.runtime.difference import differences
from dsa_engine.kernels.runtime.launch import runs_triton
from dsa_engine.kernels.runtime.operation import Comparison, compared


@pytest.fixture(autouse=True)
def everything_runs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """CPU tensors ask for a kernel, as CUDA tensors do."""
    monkeypatch.setattr(launch, "INTERPRETED", True)
    yield
    operation.replace({})


@operation.operation()
def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if not runs_triton(x) else x + x


@operation.operation()
def wrong(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if not runs_triton(x) else x * 2.5


@operation.operation()
def uncompilable(x: torch.Tensor) -> torch.Tensor:
    if not runs_triton(x):
        return x * 2
    raise RuntimeError("out of resource: shared memory\nand a long text")


@operation.operation(writes=("out",))
def write(x: torch.Tensor, out: torch.Tensor, broken: bool = False) -> None:
    out[:] = x if runs_triton(x) and broken else 2 * x


@operation.operation()
def outer(x: torch.Tensor) -> torch.Tensor:
    return wrong(x) if runs_triton(x) else x * 2


def test_every_operation_is_marked() -> None:
    """Every function that asks whether it runs a kernel can be compared and replaced, but those that only size
    a workspace, arrange matrices or call operations."""
    others, unmarked = ("lightning_indexer", "split_matrices", "max_tokens", "words_for"), []
    for path in sorted((Path(__file__).resolve().parents[3] / "kernels").rglob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and node.name not in others:
                asks = any(isinstance(x, ast.Name) and x.id == "runs_triton" for x in ast.walk(node))
                if asks and not any("operation" in ast.unparse(mark) for mark in node.decorator_list):
                    unmarked.append(f"{path.name}: {node.name}")
    assert unmarked == [], "mark them with @operation(), naming what they write"


def test_a_right_kernel_stays() -> None:
    seen: list[str] = []
    with compared(Comparison(seen.append)) as comparison:
        for _ in range(2):
            double(torch.ones(3))
    assert (
        seen == ["double"] and comparison.errors == {"double": 0.0} and comparison.wrong == {} == operation.replaced()
    )


@pytest.mark.parametrize("call", [wrong, uncompilable])
def test_a_wrong_kernel_is_replaced(call: object) -> None:
    assert callable(call)
    with compared(Comparison()) as comparison:
        assert call(torch.ones(3)).tolist() == [2, 2, 2], "the reference's result is gone on with"
    reason = comparison.wrong[call.__name__]
    assert reason in ("its result differs from the reference by 0.25; allowed is 0.002",
                      "RuntimeError: out of resource: shared memory")  # fmt: skip
    assert operation.replaced() == comparison.wrong
    assert call(torch.ones(3)).tolist() == [2, 2, 2], "also later, without a comparison"
    assert runs_triton(torch.ones(1)), "other operations keep their kernel"
    operation.replace({})
    if call is wrong:
        assert call(torch.ones(3)).tolist() == [2.5, 2.5, 2.5]


def test_what_is_written_is_compared_apart() -> None:
    """Rows of a buffer with other strides; in the end they hold the reference's result."""
    buffer = torch.zeros(4, 6)
    with compared(Comparison()) as comparison:
        write(torch.ones(4, 2), buffer[:, 1:3])
        assert comparison.errors == {"write": 0.0} and buffer.sum() == 16
        write(torch.ones(4, 2), out=buffer[:, 1:3], broken=True)
    assert comparison.wrong["write"].endswith("by 0.5; allowed is 0.002") and buffer.sum() == 16


def test_the_inner_one_is_to_blame() -> None:
    with compared(Comparison()) as comparison:
        outer(torch.ones(3))
    assert set(comparison.wrong) == {"wrong"} and set(comparison.errors) == {"wrong", "outer"}


def difference(*what: torch.Tensor) -> float:
    return max(error for error, _ in differences(*what))


def test_difference() -> None:
    inf, nan = float("inf"), float("nan")
    one = torch.tensor([1.0, -inf, nan])
    assert difference(one, one.clone()) == 0
    assert difference(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 4.0])) == 0.5
    assert difference(torch.tensor([1.0, nan]), torch.tensor([1.0, 4.0])) == inf
    assert difference(torch.tensor([1.0, inf]), torch.tensor([1.0, nan])) == inf
    assert difference(torch.tensor([1, 2, 3, 4]), torch.tensor([1, 2, 3, 5])) == 0.25
    assert difference(torch.tensor([1.0, nan]), torch.tensor([1.0, 2.0]), torch.tensor([True, False])) == 0
    assert difference(torch.empty(0), torch.empty(0)) == 0
    codes = torch.tensor([1.0, 2.0]).to(torch.float8_e4m3fn)
    assert difference(codes, codes.clone()) == 0 and difference(codes, codes[[1, 0]]) == 1
