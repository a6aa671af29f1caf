"""Pieces of layers: what is run again gives the same numbers, holds no memory longer, and is refused where it must."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dsa_engine.kernels.runtime import kernel
from dsa_engine.kernels.runtime.launch import INTERPRETED
from dsa_engine.kernels.runtime.pieces import Pieces
from kernel_bench import compile_only


class Layer:
    """Two weights, one of them in a list, and a kind."""

    def __init__(self, number: int, kind: int = 0):
        generator = torch.Generator().manual_seed(number)
        self.layer, self.kind = number, kind
        self.weight = torch.randn(6, 4, generator=generator)
        self.others = [torch.randn(4, generator=generator)]
        self.hidden = {"table": torch.randn(4, generator=generator)}


Function = Callable[..., list[Any]]


def computed(layer: Layer, batch: Any, inputs: list[Any]) -> list[Any]:
    """Views, writes in place and into a given tensor, several results, a list of tensors, an unused result."""
    x, residual, scale = inputs
    y = x @ layer.weight.t() if layer.kind else torch.mm(x, layer.weight.t())
    head, right = y.split((2, 4), dim=1)
    out = y.new_empty(len(y), 4)
    torch.add(right, layer.others[0], out=out[:, :4])
    out[:, 1:3] *= scale
    joined = torch.cat((head, out + batch.shift[: len(y)]), dim=1)
    y.sum()
    if residual is not None:
        residual.add_(layer.hidden["table"])
    return [joined, None, right, 7]


def given(number: int, rows: int = 5) -> tuple[torch.Tensor, torch.Tensor, float]:
    generator = torch.Generator().manual_seed(100 + number)
    return torch.randn(rows, 4, generator=generator), torch.randn(rows, 4, generator=generator), SCALE


SCALE = 0.5
BATCH = SimpleNamespace(shift=torch.linspace(0, 1, 8)[:, None])


# A layer's first run finds what it leads to.
LAYERS, OTHERS = ([Layer(number, kind) for number in range(10)] for kind in (0, 1))
for one in (*LAYERS, *OTHERS):
    Pieces().run(lambda layer, batch, inputs: [], one, BATCH, [])


def run(pieces: Pieces, function: Function, layers: list[Layer], rows: int = 5) -> None:
    """Each layer both ways; writes in place too."""
    for layer in layers:
        mine, wanted = given(layer.layer, rows), given(layer.layer, rows)
        ours, theirs = pieces.run(function, layer, BATCH, [*mine]), function(layer, BATCH, [*wanted])
        assert len(ours) == len(theirs)
        for a, b in zip((*ours, *mine), (*theirs, *wanted), strict=True):
            assert torch.equal(a, b) and a.stride() == b.stride() if isinstance(a, torch.Tensor) else a == b


@torch.inference_mode()
def test_the_same_numbers() -> None:
    """The third layer and all after it run the record; layers of another kind and other shapes have their own."""
    pieces = Pieces()
    run(pieces, computed, LAYERS[:5])
    assert pieces.replays == 3
    run(pieces, computed, OTHERS[:3])
    run(pieces, computed, LAYERS[:4], rows=3)
    assert pieces.replays == 3 + 1 + 2
    run(pieces, computed, LAYERS[9:])
    assert pieces.replays == 7


@torch.inference_mode()
def test_results_are_freed_after_their_last_use() -> None:
    pieces, made = Pieces(), []

    def chain(layer: Layer, batch: Any, inputs: list[Any]) -> list[Any]:
        first = inputs.pop() + 1
        made.append(weakref.ref(first))
        second = first * 2
        del first
        return [second + note(second)]

    alive: list[int] = []

    def note(x: torch.Tensor) -> torch.Tensor:
        alive.append(sum(tensor.numel() == 777 for tensor in gc.get_objects() if type(tensor) is torch.Tensor))
        return x

    for number in range(4):
        pieces.run(chain, LAYERS[number], BATCH, [torch.ones(777)])
    record = next(iter(pieces._records.values()))
    assert record is not None and record.calls is not None and pieces.replays == 2
    assert [len(call.last) for call in record.calls] == [1, 1, 1], "x, x + 1 and then its double"
    assert made[-1]() is None


REFUSED: dict[str, Function] = {
    "reads a number": lambda layer, batch, x: [x[0] * x[0].sum().item()],
    "a shape by numbers": lambda layer, batch, x: [x[0].nonzero()],
    "a tensor from elsewhere": lambda layer, batch, x: [x[0] + OTHER],
    "returns a tensor from elsewhere": lambda layer, batch, x: [OTHER],
    "an object from elsewhere": lambda layer, batch, x: [kernel.as_one(scaled, partial(float, 2), x[0])],
    "another library's operation": lambda layer, batch, x: [torch.ops.prims.neg(x[0])],
}
OTHER = torch.ones(4)


def scaled(factor: Callable[[], float], x: torch.Tensor) -> torch.Tensor:
    return x * factor()


@pytest.mark.parametrize("what", REFUSED)
@torch.inference_mode()
def test_what_is_not_repeated(what: str) -> None:
    pieces = Pieces()
    for number in range(4):
        x = given(number)[0]
        assert torch.equal(pieces.run(REFUSED[what], LAYERS[number], BATCH, [x])[0], REFUSED[what](None, BATCH, [x])[0])
    assert pieces.replays == 0


@torch.inference_mode()
def test_another_librarys_function_is_called_again() -> None:
    """It may launch what nothing here sees."""
    pieces, calls = Pieces(), []

    def function(x: torch.Tensor, both: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        calls.append(x)
        return x * float(both[0].sum()) + both[1]  # it may read numbers too

    def piece(layer: Layer, batch: Any, inputs: list[Any]) -> list[Any]:
        (x,) = inputs
        return [kernel.as_one(function, x + 1, (layer.others[0], x)) * 2]

    for number in range(4):
        layer, x = LAYERS[number], given(number)[0]
        assert torch.equal(pieces.run(piece, layer, BATCH, [x])[0], piece(layer, BATCH, [x])[0])
    assert pieces.replays == 2 and len(calls) == 8


@pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
@torch.inference_mode()
def test_launches_are_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the same compiled kernel, with the tensors of each layer."""
    from dsa_engine.kernels.rows.silu_mul import silu_mul

    launched: list[tuple[Any, ...]] = []
    monkeypatch.setattr(compile_only._Driver, "launcher_cls", lambda *_: lambda *all_: launched.append(all_))
    compile_only._driver_for.cache_clear()
    pieces = Pieces()

    def piece(layer: Layer, batch: Any, inputs: list[Any]) -> list[Any]:
        return [silu_mul(inputs[0][1:])]

    with compile_only.compile_only(90):
        for number in range(4):
            x = torch.zeros(3, 256)
            (result,) = pieces.run(piece, LAYERS[number], BATCH, [x])
            given = [value for value in launched[-1][9:] if isinstance(value, torch.Tensor)]
            assert [one.data_ptr() for one in given] == [x[1:].data_ptr(), result.data_ptr()]
    compile_only._driver_for.cache_clear()
    assert pieces.replays == 2 and len(launched) == 4
    plain = [[value for value in (*one[:6], *one[9:]) if not isinstance(value, torch.Tensor)] for one in launched]
    assert plain[1:] == plain[:-1], "all but hooks"
