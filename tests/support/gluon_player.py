"""Kernels in Gluon without a GPU, their barriers played: a kernel's own source runs on stand-ins, a thread for each
group of warps, in random orders, and what reads a buffer must find what was meant for it."""

from __future__ import annotations

import ast
import threading
from collections.abc import Callable
from pathlib import Path
from random import Random
from types import CodeType, SimpleNamespace
from typing import Any


class Fault(Exception):
    """A wait without an end, or a buffer that does not hold what is read from it."""


class Anything:
    """A number, tensor or layout that nothing played depends on."""

    def __getattr__(self, name: str) -> Any:
        return Anything()

    def __call__(self, *args: Any, **how: Any) -> Any:
        return Anything()

    __add__ = __radd__ = __sub__ = __mul__ = __mod__ = __floordiv__ = __rtruediv__ = __gt__ = __ge__ = __call__
    __getitem__ = __call__


class Barrier:
    def __init__(self) -> None:
        self.expected = self.arrived = self.phases = 0

    def arrive(self, count: int) -> None:
        self.arrived += count
        if self.arrived > self.expected:
            raise Fault("more arrivals than a phase has")
        if self.arrived == self.expected:
            self.arrived, self.phases = 0, self.phases + 1


class Buffer:
    """A part of shared memory; ``holds`` is ``nothing`` while a copy into it is under way."""

    nothing: Any = None

    def __init__(self, play: Any):
        self.play, self.holds, self.fenced, self.readers = play, self.nothing, True, 0

    def copied(self, source: Any) -> Any:
        """What it holds when a copy from ``source`` has come."""
        raise NotImplementedError

    def write(self, holds: Any, *, fenced: bool = True) -> None:
        if self.readers:
            raise Fault("overwritten while it is read")
        self.holds, self.fenced = holds, fenced

    def permute(self, order: Any) -> Buffer:
        return self


class Play:
    """A program of a kernel: one operation at a time, of any group or of a copy that comes. ``names`` has what the
    kernel's source defines.

    Args:
        code: of :func:`kernel_code`.
        stand_ins: for parts of Gluon's language.
    """

    def __init__(self, code: CodeType, random: Random, **stand_ins: Any):
        self.random, self.over, self.turn = random, False, threading.Semaphore(0)
        self.current: Any = None  # the group that runs
        self.started: list[tuple[Buffer, Any]] = []  # copies that no barrier waits for yet
        self.coming: list[tuple[list[tuple[Buffer, Any]], Barrier]] = []
        language = Anything()
        vars(language).update(
            constexpr=lambda value: value, static_range=range, allocate_shared_memory=self.allocate,
            warp_specialize=self.run, **stand_ins,
        )  # fmt: skip
        mbarrier = SimpleNamespace(init=self.init, wait=self.wait, arrive=self.arrive, MBarrierLayout=lambda: Barrier)
        async_copy = SimpleNamespace(
            async_copy_global_to_shared=self.copy, mbarrier_arrive=self.arrive_later,
            commit_group=Anything(), wait_group=lambda count: self.come(self.started),
        )  # fmt: skip
        self.names: dict[str, Any] = {"gl": language, "gluon": SimpleNamespace(jit=lambda run: run)}
        self.names |= {"mbarrier": mbarrier, "async_copy": async_copy, "fence_async_shared": self.fence}
        self.names |= {"warpgroup_mma": self.multiply, "warpgroup_mma_wait": self.multiplied}
        exec(code, self.names)

    def buffer(self, shape: list[int], number: int) -> Buffer:
        """Part ``number`` of an allocation."""
        raise NotImplementedError

    def product(self, group: Any, a: Any, b: Any) -> Any:
        """The product of two operands; raises :class:`Fault` where a buffer holds other numbers than it ought to."""
        raise NotImplementedError

    def allocate(self, dtype: Any, shape: list[int], layout: Any) -> Any:
        several = shape[0] if len(shape) > 1 else 1
        parts = [Barrier() if layout is Barrier else self.buffer(shape, number) for number in range(several)]
        return SimpleNamespace(index=lambda at: parts[at]) if len(shape) > 1 else parts[0]

    def run(self, given: list[tuple[Any, tuple[Any, ...]]], **how: Any) -> None:
        groups = [SimpleNamespace(go=threading.Semaphore(0), block=-1, reads=[], stored=[]) for _ in given]
        for group, each in zip(groups, given, strict=True):
            vars(group).update(waits=None, done=False, error=None)
            threading.Thread(target=self._group, args=(group, *each), daemon=True).start()
        try:
            while not all(group.done for group in groups):
                self._next([group for group in groups if not group.done and (group.waits is None or group.waits())])
            self.ended(groups)
        finally:
            self.over = True
            for group in groups:
                group.go.release()

    def ended(self, groups: list[Any]) -> None:
        """Raises :class:`Fault` where groups have ended too early."""

    def _next(self, able: list[Any]) -> None:
        able += [None] * bool(self.coming)
        if not able:
            raise Fault("a wait without an end")
        self.current = self.random.choice(able)
        if self.current is None:
            copies, barrier = self.coming.pop(0)
            self.come(copies)
            barrier.arrive(128)  # threads that copy
        else:
            self.current.go.release()
            self.turn.acquire()
            if self.current.error:
                raise self.current.error

    def _group(self, group: Any, function: Any, args: tuple[Any, ...]) -> None:
        group.go.acquire()
        try:
            function(*args)
        except Exception as error:
            group.error = error
        group.done = True
        self.turn.release()

    def pause(self, waits: Callable[[], bool] | None = None) -> Any:
        """Lets others run before the next operation of a group, and as long as it ``waits`` in vain."""
        group = self.current
        group.waits = waits
        self.turn.release()
        group.go.acquire()
        if self.over:
            raise Fault("another group has failed")
        group.waits = None
        return group

    def init(self, barrier: Barrier, count: int) -> None:
        barrier.expected = count

    def wait(self, barrier: Barrier, phase: int) -> None:
        self.pause(lambda: barrier.phases % 2 != phase)

    def arrive(self, barrier: Barrier, count: int) -> None:
        self.pause()
        barrier.arrive(count)

    def copy(self, target: Buffer, source: Any) -> None:
        if self.current is not None:  # before the groups begin, nothing is in use
            self.pause()
            target.write(target.nothing)
        self.started.append((target, target.copied(source)))

    def arrive_later(self, barrier: Barrier, increment_count: bool) -> None:
        self.coming.append((self.started, barrier))
        self.started = []

    def come(self, copies: list[tuple[Buffer, Any]]) -> None:
        for target, holds in copies:
            target.write(holds)
        self.started = [each for each in self.started if all(each is not other for other in copies)]

    def fence(self) -> None:
        for target in self.current.stored if self.current else ():
            target.fenced = True

    def multiply(self, a: Any, b: Any, acc: Any, **how: Any) -> Any:
        group = self.pause()
        result = self.product(group, a, b)
        for source in (each for each in (a, b) if isinstance(each, Buffer)):
            source.readers += 1
            group.reads.append(source)
        return result

    def multiplied(self, count: int, deps: Any) -> Any:
        group = self.pause()
        for source in group.reads:
            source.readers -= 1
        group.reads = []
        return deps[0]


SYNCHRONISES = ("mbarrier.wait(", "mbarrier.arrive(", "async_copy.mbarrier_arrive(", "fence_async_shared(")


class Without(ast.NodeTransformer):
    """Leaves one of the calls out by which groups wait for each other, and notes all of them."""

    def __init__(self, number: int | None = None):
        self.number, self.seen = number, list[str]()

    def visit_Expr(self, node: ast.Expr) -> ast.stmt:
        if not ast.unparse(node).startswith(SYNCHRONISES):
            return node
        self.seen.append(ast.unparse(node))
        return ast.copy_location(ast.Pass(), node) if len(self.seen) - 1 == self.number else node


def kernel_code(source: Path, groups: tuple[str, ...], change: ast.NodeTransformer) -> CodeType:
    """The code of a file without what it imports from Triton, and with a change of the functions that groups run."""
    module = ast.parse(source.read_text(encoding="utf-8"))
    for node in [*module.body]:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("triton"):
            module.body.remove(node)
        elif isinstance(node, ast.FunctionDef) and node.name in groups:
            change.visit(node)
    return compile(module, str(source), "exec")
