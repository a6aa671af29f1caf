"""The kernel in Gluon. Without a Hopper GPU its barriers are played: its own source runs on stand-ins, a thread for
each group of warps, in random orders, and what reads a buffer must find what was meant for it."""

from __future__ import annotations

import ast
import threading
from collections.abc import Callable
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dsa_engine.kernels.attention.sparse_attention import sparse_attention_reference
from dsa_engine.kernels.formats.cache_format import latent_format
from dsa_engine.kernels.libraries import gluon
from dsa_engine.kernels.runtime.launch import INTERPRETED

SOURCE = Path(__file__).resolve().parents[3] / "kernels" / "attention" / "sparse_prefill_sm90.py"
PAIRS, ORDERS = 3, 200
ON_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0) and not INTERPRETED


@pytest.mark.skipif(not ON_HOPPER, reason="needs a GPU of compute capability 9.0")
@pytest.mark.parametrize(("heads", "k"), [(128, 2048), (64, 2048), (128, 128), (64, 384)])
def test_numbers(heads: int, k: int, relative_error: Callable[..., float]) -> None:
    q, pool, slots = gluon.trial_inputs(heads, k, torch.device("cuda"))
    out, lse = gluon.sparse_prefill_sm90.sparse_prefill(q, pool, slots, 576**-0.5)
    kind = latent_format(512, 64, torch.bfloat16)
    wanted, wanted_lse = sparse_attention_reference(q, pool, slots, None, kind, 576**-0.5, 256 << 20)
    assert relative_error(out, wanted) < 6e-3 and not out[0].any() and bool((lse[0] == -torch.inf).all())
    torch.testing.assert_close(lse, wanted_lse, rtol=1e-4, atol=1e-3)


class Fault(Exception):
    """A wait without an end, or a buffer that does not hold what is read from it."""


class Anything:
    """A number, tensor or layout that no barrier depends on."""

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


NOTHING, QUERIES = -2, -3  # instead of a block's number: it is being written; it holds what every block multiplies


class Buffer:
    """A part of shared memory, and the block whose numbers it holds."""

    def __init__(self, play: Play, first: int, step: int):
        self.play, self.next, self.step = play, first, step  # the block that the next copy is of, and the one after
        self.block, self.fenced, self.readers = NOTHING, True, 0

    def write(self, block: int, *, fenced: bool = True) -> None:
        if self.readers:
            raise Fault("overwritten while it is read")
        self.block, self.fenced = block, fenced

    def permute(self, order: Any) -> Buffer:
        return self

    def store(self, value: Any) -> None:
        group = self.play.pause()
        self.write(group.block, fenced=False)
        group.stored.append(self)

    def load(self, layout: Any) -> Any:
        if self.play.pause().block != self.block:
            raise Fault("numbers of another block")
        return Anything()


class Play:
    """The kernel with ``PAIRS`` pairs of blocks: one operation at a time, of any group or of a copy that comes."""

    def __init__(self, functions: ast.Module, random: Random):
        self.random, self.over, self.turn = random, False, threading.Semaphore(0)
        self.current: Any = None  # the group that runs
        self.started: list[tuple[Buffer, int]] = []  # copies that no barrier waits for yet
        self.coming: list[tuple[list[tuple[Buffer, int]], Barrier]] = []
        language, names = Anything(), dict[str, Any]()
        vars(language).update(
            constexpr=lambda value: value, static_range=range, allocate_shared_memory=self.allocate,
            warp_specialize=self.run,
        )  # fmt: skip
        mbarrier = SimpleNamespace(init=self.init, wait=self.wait, arrive=self.arrive, MBarrierLayout=lambda: Barrier)
        async_copy = SimpleNamespace(
            async_copy_global_to_shared=self.copy, mbarrier_arrive=self.arrive_later,
            commit_group=Anything(), wait_group=lambda count: self.come(self.started),
        )  # fmt: skip
        names |= {"gl": language, "gluon": SimpleNamespace(jit=lambda run: run), "mbarrier": mbarrier}
        names |= {"async_copy": async_copy, "fence_async_shared": self.fence}
        names |= {"LN_2": Anything(), "LOWEST": Anything()}
        names |= {"warpgroup_mma": self.multiply, "warpgroup_mma_wait": self.multiplied}
        exec(compile(functions, str(SOURCE), "exec"), names)
        names |= {"_zero": self.begin, "_scan": lambda slots, k, scan: (0, PAIRS * 128 - 5, Anything())}
        names["sparse_prefill_kernel"](*[Anything()] * 5, PAIRS * 128, Anything(), 64, 512)

    def allocate(self, dtype: Any, shape: list[int], layout: Any) -> Any:
        def part(number: int, step: int) -> Any:
            return Barrier() if layout is Barrier else Buffer(self, number, step)

        if len(shape) == 1:
            return part(0, 1)
        parts = [part(number, shape[0]) for number in range(shape[0])]
        return SimpleNamespace(index=lambda at: parts[at])

    def run(self, given: list[tuple[Any, tuple[Any, ...]]], **how: Any) -> None:
        groups = [SimpleNamespace(go=threading.Semaphore(0), block=-1, reads=[], stored=[]) for _ in given]
        for group, each in zip(groups, given, strict=True):
            vars(group).update(waits=None, done=False, error=None)
            threading.Thread(target=self._group, args=(group, *each), daemon=True).start()
        try:
            while not all(group.done for group in groups):
                self._next([group for group in groups if not group.done and (group.waits is None or group.waits())])
            if [group.block for group in groups] != [2 * PAIRS - 1, 2 * PAIRS - 1, -1]:
                raise Fault("not every block was attended to")
        finally:
            self.over = True
            for group in groups:
                group.go.release()

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

    def begin(self) -> int:
        """Stands for the zero that both sides make once a block."""
        self.current.block += 1
        return 0

    def copy(self, target: Buffer, pointers: Any) -> None:
        if self.current is None:
            self.started.append((target, QUERIES))
            return
        self.pause()
        target.write(NOTHING)
        self.started.append((target, target.next))
        target.next += target.step

    def arrive_later(self, barrier: Barrier, increment_count: bool) -> None:
        self.coming.append((self.started, barrier))
        self.started = []

    def come(self, copies: list[tuple[Buffer, int]]) -> None:
        for target, block in copies:
            target.write(block)
        self.started = [each for each in self.started if each not in copies]

    def fence(self) -> None:
        for target in self.current.stored if self.current else ():
            target.fenced = True

    def multiply(self, a: Any, b: Any, acc: Any, **how: Any) -> Any:
        group = self.pause()
        for source in (each for each in (a, b) if isinstance(each, Buffer)):
            if source.block not in (group.block, QUERIES) or not source.fenced:
                raise Fault("a product of other numbers")
            source.readers += 1
            group.reads.append(source)
        return Anything()

    def multiplied(self, count: int, deps: Any) -> Any:
        group = self.pause()
        for source in group.reads:
            source.readers -= 1
        group.reads = []
        return Anything()


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


def kernel_functions(change: ast.NodeTransformer) -> ast.Module:
    module = ast.parse(SOURCE.read_text(encoding="utf-8"))
    future = [node for node in module.body if isinstance(node, ast.ImportFrom) and node.module == "__future__"]
    others = [node for node in module.body if not isinstance(node, (ast.Import, ast.ImportFrom, ast.Expr))]
    for node in others:
        if isinstance(node, ast.FunctionDef) and node.name in ("_copies", "_scores_and_left", "_right"):
            change.visit(node)
    return ast.Module([*future, *others], [])


kernel_functions(ALL := Without())


def test_barriers() -> None:
    """No order of the groups' operations ends in a wait, or lets a buffer be overwritten or read at a wrong time."""
    assert len(ALL.seen) == 12
    functions = kernel_functions(Without())
    for seed in range(ORDERS):
        Play(functions, Random(seed))


@pytest.mark.parametrize("number", range(len(ALL.seen)), ids=lambda number: f"{number}: {ALL.seen[number]}")
def test_no_barrier_is_for_nothing(number: int) -> None:
    """Without any one of them, an order is found in which the kernel fails."""
    functions = kernel_functions(Without(number))
    with pytest.raises(Fault):
        for seed in range(5 * ORDERS):
            Play(functions, Random(seed))
