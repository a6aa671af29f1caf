"""What the interpreter of these tests says of kernels that touch the wrong memory (``support/kernel_memory.py``)."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from dsa_engine.kernels.runtime.launch import INTERPRETED

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="shows what the interpreter watches")

SIZE = 16


@triton.jit
def double_kernel(x, out, elements, SIZE: tl.constexpr):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(out + at, tl.load(x + at, mask=at < elements, other=0) * 2, mask=at < elements)


@triton.jit
def reverse_kernel(x, BARRIERS: tl.constexpr, SIZE: tl.constexpr):
    """Reverses twice: each thread reads what another has written, and overwrites it."""
    at = tl.arange(0, SIZE)
    tl.store(x + at, at)
    if BARRIERS > 0:
        tl.debug_barrier()
    reversed = tl.load(x + SIZE - 1 - at)
    if BARRIERS > 1:
        tl.debug_barrier()
    tl.store(x + at, reversed)


@triton.jit
def sum_kernel(x, parts, finished, out, BARRIER: tl.constexpr, COUNTS: tl.constexpr, SIZE: tl.constexpr):
    """The last program adds what all have stored; without COUNTS the first one does."""
    program, programs, at = tl.program_id(0), tl.num_programs(0), tl.arange(0, SIZE)
    tl.store(parts + program * SIZE + at, tl.load(x + program * SIZE + at))
    if BARRIER:
        tl.debug_barrier()
    last = program == 0
    if COUNTS:
        last = tl.atomic_add(finished, 1, sem="acq_rel") == programs - 1
    if last:
        total = tl.zeros((SIZE,), tl.int32)
        for number in range(programs):
            total += tl.load(parts + number * SIZE + at)
        tl.store(out + at, total)


@pytest.mark.parametrize("elements", [SIZE - 1, SIZE + 1])
def test_addresses_lie_in_the_tensors(elements: int) -> None:
    x = torch.arange(2 * SIZE, dtype=torch.int32)[:SIZE]  # the storage goes on
    out = torch.zeros(2 * SIZE, dtype=torch.int32)
    if elements > SIZE:
        with pytest.raises(Exception, match="double_kernel reads .* of tensors"):
            double_kernel[(2,)](x, out, elements, SIZE=SIZE)
    else:
        double_kernel[(2,)](x, out, elements, SIZE=SIZE)
        assert out[:elements].tolist() == (2 * x[:elements]).tolist()


def test_a_tensor_of_nothing_has_no_addresses() -> None:
    double_kernel[(1,)](torch.empty(0), torch.empty(0), 0, SIZE=SIZE)
    with pytest.raises(Exception, match="double_kernel reads .* of tensors"):
        double_kernel[(1,)](torch.empty(0), torch.empty(0), 1, SIZE=SIZE)


@pytest.mark.parametrize("barriers", [0, 1, 2])
def test_threads_meet_before_one_touches_what_another_wrote(barriers: int) -> None:
    x = torch.empty(SIZE, dtype=torch.int32)
    if barriers < 2:
        with pytest.raises(AssertionError, match="reverse_kernel: threads of a program race"):
            reverse_kernel[(1,)](x, BARRIERS=barriers, SIZE=SIZE)
    else:
        reverse_kernel[(1,)](x, BARRIERS=barriers, SIZE=SIZE)


@pytest.mark.parametrize("barrier, counts", [(True, True), (False, True), (True, False)])
def test_programs_count_themselves_through(barrier: bool, counts: bool) -> None:
    x, parts = torch.arange(4 * SIZE, dtype=torch.int32), torch.empty(4 * SIZE, dtype=torch.int32)
    finished, out = torch.zeros(1, dtype=torch.int32), torch.empty(SIZE, dtype=torch.int32)
    if barrier and counts:
        sum_kernel[(4,)](x, parts, finished, out, BARRIER=True, COUNTS=True, SIZE=SIZE)
        assert out.tolist() == x.view(4, SIZE).sum(dim=0).tolist()
    else:
        with pytest.raises(AssertionError, match="sum_kernel: programs race"):
            sum_kernel[(4,)](x, parts, finished, out, BARRIER=barrier, COUNTS=counts, SIZE=SIZE)


@triton.jit
def number_kernel(x, STRIDE: tl.constexpr, SIZE: tl.constexpr):
    tl.store(x + tl.arange(0, SIZE) * STRIDE, tl.program_id(0))


@pytest.mark.parametrize("stride, programs, whose", [(0, 1, "threads of a program"), (1, 2, "programs")])
def test_an_element_is_written_once(stride: int, programs: int, whose: str) -> None:
    x = torch.zeros(SIZE, dtype=torch.int32)
    number_kernel[(1,)](x, STRIDE=1, SIZE=SIZE)
    with pytest.raises(AssertionError, match=f"number_kernel: {whose} race"):
        number_kernel[(programs,)](x, STRIDE=stride, SIZE=SIZE)
