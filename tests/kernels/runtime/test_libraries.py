"""The choice among our kernel and those of other libraries: tried, timed once for a class of calls, and left out with
a reason."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from dsa_engine.kernels.runtime import launch, libraries, operation
from dsa_engine.kernels.runtime.launch import runs_triton
from dsa_engine.kernels.runtime.operation import Comparison, compared

ran: list[str] = []
TIMES = {"slow": 3.0, "fast": 1.0, "faster": 0.5, "ours": 2.0}


@operation.operation(writes=("out",))
def twice(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    ran.append("ours" if runs_triton(x) else "reference")
    out.copy_(2 * x)
    return out + 1


def _adapter(name: str, factor: float = 2.0, broken: bool = False) -> Callable[..., torch.Tensor]:
    def run(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        ran.append(name)
        if broken:
            raise RuntimeError("no kernel for this chip\nand a long trace")
        out.copy_(factor * x)
        return out + 1

    return run


@pytest.fixture(autouse=True)
def everything_runs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """CPU tensors are served as CUDA tensors are; a run takes the time in TIMES of what it runs."""

    def milliseconds(run: Callable[[], Any]) -> float:
        run()
        return TIMES[ran[-1]]

    monkeypatch.setattr(launch, "INTERPRETED", True)
    monkeypatch.setattr(libraries, "_serves", lambda x: x.shape[0] > 0)
    monkeypatch.setattr(libraries, "milliseconds", milliseconds)
    monkeypatch.setattr(libraries, "ADAPTERS", {})
    ran.clear()
    yield
    libraries.use({})
    operation.replace({})


def add(
    name: str,
    takes: Callable[..., bool] = lambda x, out: True,
    module: str = "torch",
    allowance: float = 1.0,
    **how: Any,
) -> None:
    libraries.adapter("twice", name, module, takes, allowance)(_adapter(name, **how))


def call(rows: int, comparison: Comparison | None = None) -> list[str]:
    """What has run, without the reference."""
    ran.clear()
    x, out = torch.ones(rows, 3), torch.zeros(rows, 3)
    if comparison is None:
        result = twice(x, out)
    else:
        with compared(comparison):
            result = twice(x, out)
    assert (out == 2).all() and (result == 3).all()
    return [name for name in ran if name != "reference"]


def test_the_fastest_right_one_is_used() -> None:
    for name, how in (("slow", {}), ("fast", {}), ("off", {"factor": 2.1}), ("broken", {"broken": True})):
        add(name, **how)
    add("faster", module="no_such_module")
    comparison = Comparison()
    call(100, comparison)
    assert libraries.choices() == {"twice, many rows": "fast"} and not comparison.wrong
    assert comparison.rejected == {
        "slow (many rows)": "it takes 3 ms, another kernel 2 ms",
        "off (many rows)": "its result differs from the reference by 0.05; allowed is 0.002",
        "broken (many rows)": "RuntimeError: no kernel for this chip",
    }
    assert call(100) == ["fast"] == call(65) and call(64) == ["ours"], "few rows are a class of their own"
    assert call(100, comparison) == ["ours", "fast"], "checked again for other layers, and not timed"
    with launch.references():
        assert call(100) == [] and ran == ["reference"]
    call(3, comparison)
    assert libraries.choices() == {"twice, few rows": "fast", "twice, many rows": "fast"}


def test_an_allowance_is_of_its_adapter() -> None:
    add("slow", factor=2.01)
    add("fast", factor=2.01, allowance=3.0)
    add("faster", factor=2.02, allowance=3.0)
    call(100, comparison := Comparison())
    assert libraries.choices() == {"twice, many rows": "fast"} and not comparison.wrong
    assert comparison.rejected == {
        "slow (many rows)": "its result differs from the reference by 0.005; allowed is 0.002",
        "faster (many rows)": "its result differs from the reference by 0.01; allowed is 0.006",
    }


def test_what_another_layer_finds_wrong_is_dropped() -> None:
    add("fast")
    call(100, comparison := Comparison())
    wrong = libraries.Library("fast", "twice", "torch", lambda x, out: True, _adapter("fast", factor=1.0))
    libraries.IN_USE["twice"]["many rows"] = wrong
    call(100, comparison)
    assert libraries.choices() == {} and "fast (many rows)" in comparison.rejected
    assert call(100, comparison) == ["ours"], "and is not tried again"


def test_a_choice_is_restored_where_the_library_still_is() -> None:
    add("fast")
    add("gone", module="no_such_module")
    libraries.use({"twice, few rows": "fast", "twice, many rows": "gone", "other, few rows": "unknown"})
    assert libraries.choices() == {"twice, few rows": "fast"} and call(2) == ["fast"] and call(70) == ["ours"]
    libraries.use({})
    assert call(2) == ["ours"]


def test_arguments_that_it_does_not_take(monkeypatch: pytest.MonkeyPatch) -> None:
    add("fast", takes=lambda x, out: x.shape[1] == 4)
    call(2, comparison := Comparison())
    assert libraries.choices() == {} == comparison.rejected
    libraries.use({"twice, few rows": "fast"})
    assert call(2) == ["ours"]


def test_one_that_left_the_device_in_an_error_is_not_tried() -> None:
    add("fast")
    operation.replace({"fast": "it left the device in an error"})
    assert call(2, Comparison()) == ["ours"] and libraries.choices() == {}


def test_never_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(launch, "INTERPRETED", True)
    monkeypatch.setattr(libraries, "ADAPTERS", {})
    add("fast")
    call(2, Comparison())
    assert libraries.choices() == {}
    libraries.use({"twice, few rows": "fast"})
    assert call(2) == ["ours"]
    libraries.use({})
