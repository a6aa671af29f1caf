"""Pieces of layers: what all layers of a step do alike, run again without the Python between the launches.

Between two exchanges that the host waits for, a layer launches the same kernels as the layer before, on tensors of the
same shapes: its own weights and its own rows. The first layer runs a piece as it is; in the second it is recorded: the
launches of Triton, PyTorch's operations, and what is run :func:`.kernel.as_one` (exchanges, streams, other tokens'
sending). Later layers run the record with their tensors. Results are allocated as before, and freed after their last
use. What may differ from layer to layer unseen refuses the record; then each layer runs the piece as it is.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dsa_engine.kernels.runtime import kernel
from dsa_engine.kernels.runtime.recording import shapes_by_contents

Results = list[Any]
# Attributes that say nothing of what a layer launches.
_SURROUNDINGS = frozenset(
    ("runtime", "streams", "config", "layer", "sources", "group", "tp", "held", "first", "pieces", "bytes_sent")
    + ("_reached", "_dealt")
)
_OWN = ("dsa_engine.", "torch.nn.modules.")  # modules whose objects may lead to tensors
_PLAIN = (type(None), bool, int, float, str, torch.dtype)


def _is_own(x: Any) -> bool:
    return any(one.__module__.startswith(_OWN) for one in type(x).__mro__)


def reached(owner: Any) -> tuple[list[Any], list[Any]]:
    """The tensors and objects that an object leads to, and a description of all there is: if it is the same, the order
    is too."""
    things: list[Any] = []
    described: list[Any] = []
    met: set[int] = set()
    waiting = [owner]
    while waiting:
        one = waiting.pop()
        if isinstance(one, (list, tuple)):
            waiting += reversed(one)
        elif isinstance(one, dict):
            waiting += reversed(one.values())
        elif isinstance(one, _PLAIN):
            described.append(None if isinstance(one, str) else one)  # names differ
        elif id(one) not in met:
            met.add(id(one))
            if isinstance(one, torch.Tensor):
                things.append(one)
                described.append((one.dtype, one.shape, one.stride(), one.storage_offset() * one.itemsize % 16))
            elif (one is owner or _is_own(one)) and hasattr(one, "__dict__"):
                things.append(one)
                described.append(type(one))
                waiting += [value for name, value in reversed(vars(one).items()) if name not in _SURROUNDINGS]
    return things, described


class _Call(NamedTuple):
    """A call, and at which of its arguments things of a layer are: their cells, or those of a list of them."""

    run: Callable[..., Any]
    args: list[Any]  # the last ones by name
    names: list[str]
    things: list[tuple[int, int]]
    lists: list[tuple[int, Callable[..., Any], list[int]]]
    results: list[int]
    several: bool  # whether it returns several
    writes: bool  # to its arguments, perhaps
    last: list[int]  # cells that are not used any more


_kinds: dict[tuple[Any, ...], int] = {}  # by descriptions


class Pieces:
    """The pieces of a batch, recorded while its first layers run."""

    def __init__(self) -> None:
        self._records: dict[Any, _Record | None] = {}  # None: to be run as it is
        self.replays = 0

    def run(self, function: Callable[..., Results], owner: Any, batch: Any, inputs: list[Any]) -> Results:
        """``function(owner, batch, inputs)``, which empties ``inputs``.

        What it does follows from the shapes of tensors, from other inputs and from what layers of one kind have in
        common; ``batch`` leads to what all layers share. It does nothing but launches and what is run as one, and
        returns a list of what they have made.
        """
        own = vars(owner).get("_reached")
        if own is None:  # once, and after a layer has made what it makes when it first runs
            results = function(owner, batch, inputs)
            things, described = reached(owner)
            # Without the owner, whose memory would wait for the garbage collector.
            vars(owner)["_reached"] = things[1:], _kinds.setdefault(tuple(described), len(_kinds))
            return results
        kind: list[Any] = [function, own[1]]
        for x in inputs:
            if isinstance(x, torch.Tensor):
                kind += x.dtype, x.shape, x.stride(), x.storage_offset() * x.itemsize % 16
            else:
                kind.append(id(x))  # the record holds it too
        key = tuple(kind)
        record = self._records.get(key)
        if record is None:
            self._records[key] = None if key in self._records else _Record()
            return function(owner, batch, inputs)
        if record.calls is not None:
            self.replays += 1
            return record.replay([owner, *own[0]], inputs)
        results = record.make(function, owner, batch, [owner, *own[0]], inputs)
        if record.calls is None:
            self._records[key] = None
        return results


class _Record(TorchDispatchMode):
    """A piece in cells: none, those of what the owner leads to and of the inputs, then those of results."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[_Call] | None = None
        self.refused: str | None = None  # what cannot be run again
        self._inside = False  # whether something is run as one

    def make(self, function: Any, owner: Any, batch: Any, own: Sequence[Any], inputs: list[Any]) -> Results:
        """Runs the function; afterwards there are ``calls`` if it can be run again."""
        self._made: list[_Call] = []
        self._cells: dict[int, tuple[Callable[[], Any], int]] = {}
        self._rest: list[Any] = [None]  # of all cells, what they hold at the beginning
        self._held = [x for x in inputs if not isinstance(x, torch.Tensor)]  # known by their ids
        self._shared = {id(x) for x in (*reached(batch)[0], *self._held)}
        for x in (*own, *inputs):
            is_new = id(x) not in self._cells
            self._refuse(not is_new, "a tensor that is given twice")
            self._cell(x if is_new and id(x) not in self._shared else None)
        given, self._stream = len(self._rest), torch.cuda.current_stream() if torch.cuda.is_available() else None
        with kernel.watched(self), self:
            results = function(owner, batch, inputs)
        self._results = [self._result(x) for x in results]
        if self.refused is None:
            self.calls = _needed(self._made, self._results, 1 + len(own))
        del self._made, self._cells, self._shared, self._rest[:given]
        return results

    def replay(self, own: Sequence[Any], inputs: list[Any]) -> Results:
        at = [None, *own, *inputs, *self._rest]
        inputs.clear()
        assert self.calls is not None
        try:
            for run, args, names, things, lists, results, several, _, last in self.calls:
                given = args.copy()
                for where, cell in things:
                    given[where] = at[cell]
                for where, make, cells in lists:
                    given[where] = make(map(at.__getitem__, cells))
                if names:
                    count = len(given) - len(names)
                    made = run(*given[:count], **dict(zip(names, given[count:], strict=True)))
                else:
                    made = run(*given)
                if several:
                    for cell, one in zip(results, made, strict=False):
                        at[cell] = one
                elif results:
                    at[results[0]] = made
                for cell in last:
                    at[cell] = None
        except BaseException:
            if self._stream is not None:  # it may be within another one's calls
                torch.cuda.set_stream(self._stream)
            raise
        return [*map(at.__getitem__, self._results)]

    def _refuse(self, refused: bool, what: object) -> None:
        if refused and self.refused is None:
            self.refused = f"{tuple(what.shape)}, {what.dtype}" if isinstance(what, torch.Tensor) else str(what)

    def _cell(self, x: Any, value: Any = None) -> int:
        """A new cell, of ``x``, which holds ``value`` at the beginning."""
        if not isinstance(x, _PLAIN):
            self._cells[id(x)] = weakref.ref(x), len(self._rest)
        self._rest.append(value)
        return len(self._rest) - 1

    def _at(self, x: Any) -> int | None:
        """The cell of what the piece was given or has made; None if ``x`` is the same for all layers."""
        known = self._cells.get(id(x))
        if known is not None and known[0]() is x:
            return known[1]
        self._refuse(isinstance(x, torch.Tensor) and id(x) not in self._shared, x)
        return None

    def _result(self, x: Any) -> int:
        cell = self._at(x)
        self._refuse(cell is None and not isinstance(x, _PLAIN), x)
        return self._cell(None, x) if cell is None else cell

    def _add(self, run: Any, args: Any, named: dict[str, Any], result: Any, writes: bool, before: Any = None) -> None:
        if named and not any(isinstance(x, torch.Tensor) for x in named.values()):
            run, named = partial(run, **named), {}
        elif named:
            args, before = (*args, *named.values()), None
        fixed, things, lists = [*args], [], []
        for where, value in enumerate(before or args):
            if isinstance(value, (list, tuple)):
                cells = [self._at(x) for x in value]
                if any(cell is not None for cell in cells):
                    pairs, fixed[where] = zip(cells, value, strict=True), None
                    make: Any = type(value)
                    make = partial(tuple.__new__, make) if isinstance(value, tuple) else make
                    lists.append((where, make, [self._cell(None, x) if cell is None else cell for cell, x in pairs]))
            elif (cell := self._at(value)) is not None:
                things.append((where, cell))
                fixed[where] = None
        several = isinstance(result, (list, tuple))
        made = result if several else () if result is None else (result,)
        given = {id(x) for x in args}
        results = [self._cell(None if id(x) in given or id(x) in self._shared else x) for x in made]
        self._made.append(_Call(run, fixed, [*named], things, lists, results, several, writes, []))

    def launched(self, one: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
        one.launch(grid, *args, **constants)
        run, again = one.again(grid, args, constants)
        self._add(run, again, {}, None, True)

    def called(self, function: Callable[..., Any], /, *args: Any, **named: Any) -> Any:
        before = [[*x] if isinstance(x, list) else x for x in args]  # it may empty them
        self._inside = True
        try:
            with kernel.watched(None):
                result = function(*args, **named)
        finally:
            self._inside = False
        for x in (*args, *named.values()):
            is_local = isinstance(x, FunctionType) and x.__closure__ is not None
            if is_local or isinstance(x, (partial, MethodType)) or (_is_own(x) and not isinstance(x, tuple)):
                self._refuse(self._at(x) is None and id(x) not in self._shared, x)  # one of this layer alone?
        self._add(function, args, named, result, function is not partial, before)
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
        tensors = [x for x in tree_leaves(args) if isinstance(x, torch.Tensor)]
        to_host = computes and any(x.is_cpu for x in made) and not all(x.is_cpu for x in tensors)
        self._refuse(not computes or to_host or shapes_by_contents(func, args), func)
        self._add(func._op, args, kwargs, result, func._schema.is_mutable)
        return result


def _needed(calls: list[_Call], results: Sequence[int], first: int) -> list[_Call]:
    """The calls that do something, or whose results are used; with the cells from ``first`` on that nothing uses after
    each."""
    used, needed = set(results), []
    for one in reversed(calls):
        if one.writes or not used.isdisjoint(one.results):
            here = {*one.results, *(cell for _, cell in one.things), *chain(*(cells for *_, cells in one.lists))}
            one.last.extend(cell for cell in here - used if cell >= first)
            used |= here
            needed.append(one)
    return needed[::-1]
