"""The kernel in Gluon. Without a Hopper GPU its barriers are played."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random
from types import CodeType
from typing import Any

import pytest
import torch

from dsa_engine.kernels.attention.sparse_attention import sparse_attention_reference
from dsa_engine.kernels.formats.cache_format import latent_format
from dsa_engine.kernels.libraries import gluon
from dsa_engine.kernels.runtime.launch import INTERPRETED
from gluon_player import Anything, Buffer, Fault, Play, Without, kernel_code

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


QUERIES = -2  # instead of a block's number: what every block multiplies
GROUPS = ("_copies", "_scores_and_left", "_right")


class Block(Buffer):
    """A part of shared memory that holds the numbers of a block."""

    def __init__(self, play: Play, first: int, step: int):
        super().__init__(play)
        self.next, self.step = first, step  # the block that the next copy is of, and how far the one after lies

    def copied(self, source: Any) -> int:
        if self.play.current is None:
            return QUERIES
        self.next += self.step
        return self.next - self.step

    def store(self, value: Any) -> None:
        group = self.play.pause()
        self.write(group.block, fenced=False)
        group.stored.append(self)

    def load(self, layout: Any) -> Any:
        if self.play.pause().block != self.holds:
            raise Fault("numbers of another block")
        return Anything()


class Blocks(Play):
    """The kernel with ``PAIRS`` pairs of blocks."""

    def __init__(self, code: CodeType, random: Random):
        super().__init__(code, random)
        self.names |= {"_zero": self.begin, "_scan": lambda slots, k, scan: (0, PAIRS * 128 - 5, Anything())}
        self.names["sparse_prefill_kernel"](*[Anything()] * 5, PAIRS * 128, Anything(), 64, 512)

    def buffer(self, shape: list[int], number: int) -> Block:
        return Block(self, number, shape[0] if len(shape) > 1 else 1)

    def begin(self) -> int:
        """Stands for the zero that both sides make once a block."""
        self.current.block += 1
        return 0

    def product(self, group: Any, a: Any, b: Any) -> Any:
        for source in (each for each in (a, b) if isinstance(each, Buffer)):
            if source.holds not in (group.block, QUERIES) or not source.fenced:
                raise Fault("a product of other numbers")
        return Anything()

    def ended(self, groups: list[Any]) -> None:
        if [group.block for group in groups] != [2 * PAIRS - 1, 2 * PAIRS - 1, -1]:
            raise Fault("not every block was attended to")


kernel_code(SOURCE, GROUPS, ALL := Without())


def test_barriers() -> None:
    """No order of the groups' operations ends in a wait, or lets a buffer be overwritten or read at a wrong time."""
    assert len(ALL.seen) == 12
    code = kernel_code(SOURCE, GROUPS, Without())
    for seed in range(ORDERS):
        Blocks(code, Random(seed))


@pytest.mark.parametrize("number", range(len(ALL.seen)), ids=lambda number: f"{number}: {ALL.seen[number]}")
def test_no_barrier_is_for_nothing(number: int) -> None:
    """Without any one of them, an order is found in which the kernel fails."""
    code = kernel_code(SOURCE, GROUPS, Without(number))
    with pytest.raises(Fault):
        for seed in range(5 * ORDERS):
            Blocks(code, Random(seed))
