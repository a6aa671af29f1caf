"""Index scores in Gluon, played with numbers: whatever the order of their operations, the programs of a call give the
reference's scores."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from random import Random
from types import CodeType
from typing import Any

import pytest
import torch

from dsa_engine.kernels.formats.cache_format import FP8, index_key_format
from dsa_engine.kernels.indexer.indexer_scores import indexer_scores
from dsa_engine.kernels.rows.segment import Segment, Segments
from dsa_engine.kernels.runtime import launch
from gluon_player import Buffer, Fault, Play, Without, kernel_code
from kernel_cases import CASES
from kernel_cases.inputs import Inputs, Sizes
from variants import scores

SOURCE, GROUPS, ORDERS = Path(scores.__file__), ("_copies", "_scores"), 12


class Pointer:
    """Elements of a tensor's memory."""

    def __init__(self, memory: torch.Tensor, at: Any):
        self.memory, self.at = memory, at

    def __add__(self, more: Any) -> Pointer:
        return Pointer(self.memory, self.at + more)

    @classmethod
    def to(cls, x: torch.Tensor) -> Pointer:
        return cls(torch.empty(0, dtype=x.dtype).set_(x.untyped_storage()), x.storage_offset())

    def load(self) -> torch.Tensor:
        at = torch.as_tensor(self.at)
        assert at.min() >= 0
        if self.memory.dtype == FP8:  # has no indexing
            return self.memory.view(torch.uint8)[at].view(FP8).float()
        return self.memory[at].clone()  # a view, where `at` is one number

    def store(self, values: torch.Tensor, mask: torch.Tensor) -> None:
        self.memory[self.at[mask]] = values[mask]


class Numbers(Buffer):
    nothing = torch.tensor(torch.nan)

    def copied(self, source: Pointer) -> torch.Tensor:
        return source.load()

    def load(self, layout: Any) -> torch.Tensor:
        self.play.pause()
        return self.holds.expand(128)


class Program(Play):
    """The program at ``at`` of a grid."""

    def __init__(self, code: CodeType, random: Random, at: tuple[int, int], grid: tuple[int, int]):
        super().__init__(
            code, random, program_id=lambda axis: at[axis], num_programs=lambda axis: grid[axis],
            load=Pointer.load, store=Pointer.store, arange=lambda first, end, layout: torch.arange(first, end),
            minimum=self.least, maximum=lambda a, b: -self.least(-a, -b), abs=torch.abs, sum=torch.sum,
            split=lambda x: x.unbind(-1), convert_layout=lambda x, layout, assert_trivial: x, int64=torch.int64,
            zeros=lambda shape, dtype, layout: None,
        )  # fmt: skip

    @staticmethod
    def least(a: Any, b: Any) -> torch.Tensor:
        return torch.minimum(torch.as_tensor(a), torch.as_tensor(b))

    def buffer(self, shape: list[int], number: int) -> Numbers:
        return Numbers(self)

    def product(self, group: Any, a: torch.Tensor, b: Buffer) -> torch.Tensor:
        return a @ b.holds.expand(128, 128).T


class Launch:
    """Plays every program, with two stages, so that each is used again."""

    def __init__(self, code: CodeType, random: Random):
        self.code, self.random = code, random

    def __getitem__(self, grid: tuple[int, int]) -> Any:
        return partial(self.run, grid)

    def run(self, grid: tuple[int, int], *args: Any, num_warps: int) -> None:
        pointers = [Pointer.to(each) if isinstance(each, torch.Tensor) else each for each in args]
        for at in ((i, j) for i in range(grid[0]) for j in range(grid[1])):
            program = Program(self.code, self.random, at, grid)
            program.names["STAGES"] = 2
            program.names["gluon_scores_kernel"](*pointers)


@pytest.fixture(scope="module")
def call() -> partial[torch.Tensor]:
    """Two sequences: one whose first queries do not see the second program's keys, of which there are 16, and whose
    scores fill their rows; and one that ends within a page. Tiles of 8, 8, 7 and 5 queries. Where no key was stored,
    there are codes of NaN."""
    segments = Segments.of([Segment(0, 23, 1, 249), Segment(23, 5, 0, 65)])
    key_format, make = index_key_format(128, FP8), Inputs(torch.device("cpu"), torch.float32)
    tables = torch.tensor([[6, 2, 0, 0, 0], [3, 7, 1, 5, 4]], dtype=torch.int32)
    pool = key_format.empty_pool(8, 64, make.device).fill_(0xFF)
    pages = key_format.random_pages(8, 64, torch.Generator().manual_seed(1))
    for sequence, end in segments.contexts.items():
        for first in range(0, end, 64):
            page, stored = tables[sequence, first // 64], 128 * min(64, end - first)
            pool.view(8, -1)[page, :stored] = pages.view(8, -1)[page, :stored]
            pool.view(8, -1)[page, 64 * 128 :] = pages.view(8, -1)[page, 64 * 128 :]
    return partial(
        indexer_scores, make.fp8(28, 64, 128), make.floats(28, 64), pool, tables, segments, key_format=key_format
    )


def played(call: partial[torch.Tensor], code: CodeType, seed: int, monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    monkeypatch.setattr(scores, "gluon_scores_kernel", Launch(code, Random(seed)))
    return scores.gluon_scores(*call.args, **call.keywords)


kernel_code(SOURCE, GROUPS, ALL := Without())


def test_numbers_in_any_order(call: partial[torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(ALL.seen) == 4
    code = kernel_code(SOURCE, GROUPS, Without())
    for seed in range(ORDERS):
        scores.check(played(call, code, seed, monkeypatch), call)


@pytest.mark.parametrize("number", range(len(ALL.seen)), ids=lambda number: f"{number}: {ALL.seen[number]}")
def test_no_barrier_is_for_nothing(number: int, call: partial[torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without any one of them, an order is found in which the kernel fails."""
    code = kernel_code(SOURCE, GROUPS, Without(number))
    with pytest.raises((Fault, ValueError)):
        for seed in range(ORDERS):
            scores.check(played(call, code, seed, monkeypatch), call)


def test_a_wrong_score_is_refused(call: partial[torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """As often as it comes; once scores are right, they are compared no more."""
    result, run = call() * (1 + 1e-6), scores.checked(call)
    monkeypatch.setattr(scores, "gluon_scores", lambda *args, **how: result)
    result[3, 252] += (error := 1e-3 * result[3, :253].abs().mean())
    for _ in range(2):
        with pytest.raises(ValueError, match="1 of .* scores differ .* row 3 at key 252"):
            run()
    result[3, 252] -= error
    run()
    result.zero_()
    run()


def test_cases_are_for_hopper_only() -> None:
    make = Inputs(torch.device("cpu"), torch.bfloat16, untouched=True)
    for capability, count in ((90, 0 if launch.INTERPRETED else 2), (100, 0)):
        with launch.compiling_for(capability):
            cases = list(CASES["variant_scores"](make, Sizes()))
        assert len(cases) == count and all(case.shape.startswith("2048 queries") for case in cases)
