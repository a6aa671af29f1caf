"""The self-check sees wrong kernels of every operation: its reference takes the place of a kernel, with a fault."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from dsa_engine.kernels.formats.row_format import IndexKeyFormat
from dsa_engine.kernels.runtime import launch, operation
from dsa_engine.kernels.runtime.operation import OPERATIONS, Comparison
from operation_cases import CASES, PAGE, Call, Make

WHOLE = (torch.int32, torch.int64)

# A row of each part of what an operation gives, before and after -> the row of a wrong kernel.
Rows = dict[str, torch.Tensor]
Fault = Callable[[Rows, Rows], None]


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    yield
    operation.replace({})


@functools.cache
def made_case(name: str) -> Call:
    return CASES[name](Make())


def case(name: str) -> Call:
    return copy.deepcopy(made_case(name))


def parts_of(name: str, given: dict[str, Any], result: Any) -> dict[str, tuple[torch.Tensor, Any]]:
    """The parts of what an operation has given, and the indices of their rows: "codes" and "scales" of quantised
    numbers, and others by number."""
    if "sets" in given and result is None:
        return {}  # its results are new tensors
    if "slots" in given and result is None:
        slots = given["slots"].long()
        rows = slots // PAGE, slots % PAGE
        out = given.get("out", given.get("pool"))
        if out is None:
            return {"0": (given["latent_pool"], rows), "1": (given["key_pool"], rows)}
        kind = given.get("key_format", given.get("row_format"))
        if kind is None or not kind.coded:
            return {"0": (out, rows)}
        if isinstance(kind, IndexKeyFormat):
            codes, scales = kind.views(out)
            assert scales is not None
            return {"codes": (codes, rows), "scales": (scales, rows)}
        at = kind.rank + 4 * (kind.rank // 128)
        parts = {"codes": (0, kind.rank, torch.float8_e4m3fn), "scales": (kind.rank, at, torch.float32)}
        parts["0"] = (at, kind.columns, torch.bfloat16)
        return {key: (out[..., first:last].view(dtype), rows) for key, (first, last, dtype) in parts.items()}
    tensors = [given["out"]] if result is None else operation._tensors(result)
    names = ("codes", "scales") if name.startswith("quantize_") else map(str, range(len(tensors)))
    return {key: (x, (torch.arange(len(x)),)) for key, x in zip(names, tensors, strict=True)}


def run_with(name: str, fault: Fault) -> str:
    """Compares an operation whose kernel is the reference with a fault; returns why it is replaced, or nothing."""
    marked = OPERATIONS[name.partition(",")[0]]

    @functools.wraps(marked.run)
    def broken(*args: Any, **kwargs: Any) -> Any:
        bound = operation.inspect.signature(marked.run).bind(*args, **kwargs)
        bound.apply_defaults()
        if launch.runs_references():
            return marked.run(*args, **kwargs)
        start = (
            {k: (x.clone(), at) for k, (x, at) in parts_of(name, bound.arguments, None).items()}
            if marked.writes and bound.arguments.get(marked.writes[0]) is not None
            else {}
        )
        with launch.references():
            result = marked.run(*args, **kwargs)
        made = parts_of(name, bound.arguments, result)
        rows = {key: x[at].clone() for key, (x, at) in made.items()}
        before = {key: start[key][0][at] if start else torch.zeros_like(x[at]) for key, (x, at) in made.items()}
        fault(rows, before)
        for key, (x, at) in made.items():
            x[at] = rows[key]
        return result

    comparison = Comparison()
    args, kwargs = case(name)
    operation.compare(comparison, replace(marked, run=broken), args, kwargs)
    operation.replace({})
    return comparison.wrong.get(marked.run.__name__, "")


def nothing(rows: Rows, before: Rows) -> None:
    pass


def scaled(factor: float) -> Fault:
    def fault(rows: Rows, before: Rows) -> None:
        for key, x in rows.items():
            if x.dtype not in WHOLE and key != "codes":
                x *= factor

    return fault


def dropped(count: int) -> Fault:
    """Rows that keep what they held; a new tensor's hold zeros."""

    def fault(rows: Rows, before: Rows) -> None:
        for key, x in rows.items():
            first = min(7, max(0, len(x) - count))
            x[first : first + count] = before[key][first : first + count]

    return fault


def one_late(rows: Rows, before: Rows) -> None:
    for key, x in rows.items():
        rows[key] = x.roll(1, 0)


def turned_around(rows: Rows, before: Rows) -> None:
    for key, x in rows.items():
        if key != "scales":
            rows[key] = -x - 1 if x.dtype in WHOLE else (-x.float()).to(x.dtype)


def nan_in_one_lane(rows: Rows, before: Rows) -> None:
    """Whole numbers have none: one is another number."""
    key = next((k for k, x in rows.items() if x.dtype.is_floating_point), "0")
    flat = rows[key].view(-1)
    flat[-1] = flat[-1] + 1 if flat.dtype in WHOLE else float("nan")


# One of the 16 positions of one of 60 rows.
ROUNDING_DECIDES = {(f"lightning_indexer{case}", nan_in_one_lane) for case in ("", ", candidates")}


def has_numbers(name: str) -> bool:
    marked = OPERATIONS[name.partition(",")[0]]
    args, kwargs = case(name)
    bound = operation.inspect.signature(marked.run).bind(*args, **kwargs)
    bound.apply_defaults()
    with launch.references():
        made = parts_of(name, bound.arguments, marked.run(*args, **kwargs))
    return any(x.dtype not in WHOLE for x, _ in made.values())


def test_every_operation_has_a_case() -> None:
    ours = {name for name, marked in OPERATIONS.items() if marked.run.__module__.startswith("dsa_engine.kernels")}
    assert ours == {name.partition(",")[0] for name in CASES}


def watch(patch: pytest.MonkeyPatch, seen: list[str]) -> None:
    """Writes down calls after which the host needs values of a tensor, or sizes that depend on them."""

    def watched(name: str, call: Callable[..., Any], waits: Callable[..., bool]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            seen.extend([name] * waits(*args))
            return call(*args, **kwargs)

        return run

    def by_mask(x: torch.Tensor, index: Any, *_: Any) -> bool:
        parts = index if isinstance(index, tuple) else (index,)
        return any(isinstance(part, torch.Tensor) and part.dtype == torch.bool for part in parts)

    for name in ("item", "tolist", "nonzero", "__bool__", "__int__"):
        patch.setattr(torch.Tensor, name, watched(name, getattr(torch.Tensor, name), lambda *_: True))
    for name in ("__getitem__", "__setitem__"):
        patch.setattr(torch.Tensor, name, watched(name, getattr(torch.Tensor, name), by_mask))
    patch.setattr(torch.Tensor, "to", watched("to", torch.Tensor.to, lambda _, to, *__: isinstance(to, torch.device)))
    patch.setattr(torch, "bincount", watched("bincount", torch.bincount, lambda *_: True))


@pytest.mark.parametrize("name", CASES)
def test_references_that_wait_are_marked(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replaced operation turns CUDA graphs off only if its reference cannot be captured."""
    marked = OPERATIONS[name.partition(",")[0]]
    args, kwargs = case(name)
    seen: list[str] = []
    with launch.references(), monkeypatch.context() as patch:
        watch(patch, seen)
        marked.run(*args, **kwargs)
    assert bool(seen) == marked.waits, seen


@pytest.mark.parametrize("name", CASES)
def test_wrong_kernels_are_seen(name: str) -> None:
    assert run_with(name, nothing) == ""
    for fault in (one_late, turned_around, nan_in_one_lane, dropped(1)):
        if (name, fault) not in ROUNDING_DECIDES:
            assert "differs from the reference" in run_with(name, fault), fault
    if has_numbers(name):
        assert all(run_with(name, scaled(factor)) for factor in (1.02, 0.5))
