"""Pieces of a layer: what all layers of a step do alike, run again without the Python between the launches.

Between two exchanges a layer launches the same kernels as the layer before, on tensors of the same shapes: its own
weights and its own rows. The first layer runs a piece as it is; in the second it is recorded, every launch of Triton
and every operation of PyTorch; later layers run the record with their tensors. Results are allocated as before, and
freed after their last use. A piece runs on one stream, has no exchange in it and reads no numbers on the host.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dsa_engine.kernels.runtime import kernel
from dsa_engine.kernels.runtime.recording import shapes_by_contents

Results = list[Any]  # tensors, None and numbers
# Attributes that say nothing of what a layer launches.
_SURROUNDINGS = frozenset(
    ("runtime", "streams", "config", "layer", "sources", "group", "tp", "held", "first", "pieces", "_reached")
)
_OWN = ("dsa_engine.", "torch.nn.modules.")  # modules whose objects may lead to tensors
_NONE, _STREAM, _FIRST = range(3)  # cells: of None, of the current stream, and of the first tensor


class _Reached(NamedTuple):
    tensors: list[torch.Tensor]
    kind: int  # number of a description


_kinds: dict[tuple[Any, ...], int] = {}


def reached(owner: Any) -> tuple[list[torch.Tensor], list[Any]]:
    """The tensors that an object leads to, and a description of all there is: if it is the same, the order is too."""
    tensors: list[torch.Tensor] = []
    described: list[Any] = []
    met: set[int] = set()
    waiting = [owner]
    while waiting:
        one = waiting.pop()
        if isinstance(one, (list, tuple)):
            waiting += reversed(one)
        elif isinstance(one, dict):
            waiting += reversed(one.values())
        elif one is None or isinstance(one, (bool, int, float, torch.dtype)):
            described.append(one)
        elif id(one) not in met:
            met.add(id(one))
            if isinstance(one, torch.Tensor):
                tensors.append(one)
                described.append((one.dtype, one.shape, one.stride(), one.storage_offset() * one.itemsize % 16))
            elif (one is owner or type(one).__module__.startswith(_OWN)) and hasattr(one, "__dict__"):
                described.append(type(one))
                waiting += [value for name, value in reversed(vars(one).items()) if name not in _SURROUNDINGS]
    return tensors, described


class _Call(NamedTuple):
    """A call, and at which of its arguments tensors are: their cells, or those of a list of them."""

    run: Callable[..., Any]
    args: list[Any]
    named: dict[str, Any]
    tensors: list[tuple[Any, int]]
    lists: list[tuple[Any, list[int]]]
    results: list[int]
    several: bool  # whether it returns a list
    writes: bool  # to its arguments, perhaps
    last: list[int]  # cells that are not used any more


class Pieces:
    """The pieces of a batch, recorded while its first layers run."""

    def __init__(self) -> None:
        self._records: dict[Any, _Record | None] = {}  # None: to be run as it is
        self.replays = 0

    def run(self, function: Callable[..., Results], owner: Any, batch: Any, inputs: Sequence[Any]) -> Results:
        """``function(owner, batch, *inputs)``; ``batch`` leads to the tensors that all layers have in common.

        What it does follows from the shapes of tensors, from other inputs and from what layers of one kind have in
        common. It does nothing but launches, and returns a list of what they have made, and of numbers.
        """
        own = vars(owner).get("_reached")
        if own is None:  # found once: weights stay where they are
            tensors, described = reached(owner)
            own = vars(owner)["_reached"] = _Reached(tensors, _kinds.setdefault(tuple(described), len(_kinds)))
        kind: list[Any] = [function, own.kind]
        for x in inputs:
            if isinstance(x, torch.Tensor):
                kind.append((x.dtype, x.shape, x.stride(), x.storage_offset() * x.itemsize % 16))
            else:
                kind.append(id(x))  # the record has it too
        key = tuple(kind)
        record = self._records.get(key)
        if record is None:
            self._records[key] = None if key in self._records else _Record()
            return function(owner, batch, *inputs)
        if record.calls is not None:
            self.replays += 1
            return record.replay(own.tensors, inputs)
        results = record.make(function, owner, batch, own.tensors, inputs)
        if record.calls is None:
            self._records[key] = None
        return results


class _Record(TorchDispatchMode):
    """A piece in cells: those of the owner's tensors and the inputs, then those of results."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[_Call] | None = None
        self.refused = self._inside = False  # whether it cannot be run again; whether a library runs

    def make(
        self, function: Any, owner: Any, batch: Any, own: Sequence[torch.Tensor], inputs: Sequence[Any]
    ) -> Results:
        """Runs the function; afterwards there are ``calls`` if it can be run again."""
        self._made: list[_Call] = []
        self._cells: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}
        self._shared = {id(x) for x in reached(batch)[0]}
        self._held = [x for x in inputs if not isinstance(x, torch.Tensor)]  # known by their ids
        self._count, self._launches = _FIRST, False
        for x in chain(own, inputs):
            is_tensor = isinstance(x, torch.Tensor)
            self.refused = self.refused or (is_tensor and id(x) in self._cells)
            self._cell(x if is_tensor else None)
        given = self._count
        with kernel.watched(self), self:
            results = function(owner, batch, *inputs)
        self._numbers: list[tuple[int, Any]] = []  # results that are no tensors, and their cells
        self._results = [self._result(x) for x in results]
        if not self.refused:
            self.calls = _needed(self._made, self._results, given)
        del self._made, self._cells, self._shared
        return results

    def replay(self, own: Sequence[torch.Tensor], inputs: Sequence[Any]) -> Results:
        at: list[Any] = [None] * self._count
        at[_STREAM] = kernel.current_stream() if self._launches else None
        at[_FIRST : _FIRST + len(own)] = own
        at[_FIRST + len(own) : _FIRST + len(own) + len(inputs)] = inputs
        for cell, number in self._numbers:
            at[cell] = number
        assert self.calls is not None
        for run, args, named, tensors, lists, results, several, _, last in self.calls:
            given: Any = args.copy()
            named_too: Any = named.copy() if named else named
            for where, cell in tensors:
                (named_too if where.__class__ is str else given)[where] = at[cell]
            for where, cells in lists:
                (named_too if where.__class__ is str else given)[where] = [*map(at.__getitem__, cells)]
            made = run(*given, **named_too)
            if several:
                for cell, one in zip(results, made, strict=False):
                    at[cell] = one
            elif results:
                at[results[0]] = made
            for cell in last:
                at[cell] = None
        return [*map(at.__getitem__, self._results)]

    def _result(self, x: Any) -> int:
        if isinstance(x, torch.Tensor):
            cell = self._at(x)
            self.refused = self.refused or isinstance(cell, torch.Tensor)
            return _NONE if self.refused else cell
        self._numbers.append((self._cell(None), x))
        return self._count - 1

    def _cell(self, x: torch.Tensor | None) -> int:
        """A new cell, of ``x``."""
        if x is not None:
            self._cells[id(x)] = weakref.ref(x), self._count
        self._count += 1
        return self._count - 1

    def _at(self, x: torch.Tensor) -> Any:
        """The cell of a tensor that the piece was given or has made; itself if it is that of all layers."""
        known = self._cells.get(id(x))
        if known is not None and known[0]() is x:
            return known[1]
        self.refused = self.refused or id(x) not in self._shared
        return x

    def _add(
        self, run: Any, args: Sequence[Any], named: dict[str, Any], made: Any, several: bool, writes: bool
    ) -> None:
        both: tuple[Any, Any] = list(args), dict(named)
        tensors, lists = [], []
        for holds, where, value in [(both[0], *one) for one in enumerate(args)] + [
            (both[1], *one) for one in named.items()
        ]:
            if isinstance(value, torch.Tensor):
                holds[where] = self._at(value)
                if not isinstance(holds[where], torch.Tensor):
                    tensors.append((where, holds[where]))
                    holds[where] = None
            elif isinstance(value, (list, tuple)) and any(isinstance(x, torch.Tensor) for x in value):
                cells = [_NONE if x is None else self._at(x) for x in value]
                self.refused = self.refused or any(isinstance(x, torch.Tensor) for x in cells)
                lists.append((where, cells))
            elif value is kernel.STREAM:
                tensors.append((where, _STREAM))
                self._launches = True
        self._made.append(_Call(run, *both, tensors, lists, [*map(self._cell, made)], several, writes, []))

    def launched(self, one: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
        one.launch(grid, *args, **constants)
        run, args, constants = one.again(grid, args, constants)
        self._add(run, args, constants, (), False, True)

    def called(self, library: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        self._inside = True
        try:
            with kernel.watched(None):
                result = library(*args, **kwargs)
        finally:
            self._inside = False
        made = result if isinstance(result, tuple) else (result,)
        self.refused = self.refused or not all(isinstance(x, torch.Tensor) for x in made)
        self._add(library, args, kwargs, () if self.refused else made, made is result, True)
        return result

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # or PyTorch imports its compiler

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self._inside or func.namespace in ("profiler", "prim"):  # marks a range, or asks what a tensor is
            return result
        made = result if isinstance(result, (list, tuple)) else [result]
        computes = func.namespace == "aten" and all(isinstance(x, torch.Tensor) for x in made)
        if not computes or shapes_by_contents(func, args):
            self.refused = True
            return result
        known = {id(x) for x in tree_leaves((args, kwargs))}
        fresh = [x for x in made if id(x) not in known]
        self.refused = self.refused or len(fresh) not in (0, len(made))
        self._add(func._op, args, kwargs, fresh, made is result, func._schema.is_mutable)
        return result


def _needed(calls: list[_Call], results: Sequence[int], given: int) -> list[_Call]:
    """The calls that write to something, or whose results are used; with the cells from ``given`` on that nothing uses
    after each."""
    used, needed = set(results), []
    for one in reversed(calls):
        if one.writes or not used.isdisjoint(one.results):
            here = {*one.results, *(cell for _, cell in one.tensors), *chain(*(cells for _, cells in one.lists))}
            one.last.extend(cell for cell in here - used if cell >= given)
            used |= here
            needed.append(one)
    return needed[::-1]
