"""Decisions before a launch: Triton or the reference, and for which chip.

A kernel runs on CUDA tensors. Under ``TRITON_INTERPRET=1`` it also runs on CPU tensors, in Triton's interpreter, which
is slow and proves its arithmetic; elsewhere CPU tensors take the reference, or a kernel for the CPU
(:mod:`.cpu`). Launch configurations are beside each kernel, in a table by compute capability, with the device they
were measured on; nothing is tuned while serving.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import NamedTuple, TypeVar

import torch
import triton

INTERPRETED: bool = triton.knobs.runtime.interpret

# The interpreter has no chip: it runs what Hopper would.
_INTERPRETED_AS = 90
_INTERPRETED_MULTIPROCESSORS = 4

_compiling_for: int | None = None
_references_always = False


class _OfThread(threading.local):
    """What engines of one process differ in: each has a thread."""

    references = False
    batch_invariant = False


_of_thread = _OfThread()

Config = TypeVar("Config")


def runs_triton(x: torch.Tensor) -> bool:
    """Whether the operation on ``x`` launches its kernel; if not, it runs its reference."""
    if _of_thread.references or (_references_always and not _of_thread.batch_invariant):
        return False
    return x.is_cuda or INTERPRETED or _compiling_for is not None


def runs_native() -> bool:
    """Whether CPU tensors may take the CPU's own kernels (`cpu.py`): neither Triton nor
    the references are to run on them."""
    return not (INTERPRETED or _compiling_for is not None or runs_references())


class Chip(NamedTuple):
    """What launches depend on."""

    capability: int  # as in sm_90
    multiprocessors: int  # smallest number of programs that run at a time
    converts_e4m3: bool  # by an instruction; the interpreter's conversion is wrong

    @classmethod
    def of(cls, capability: int, multiprocessors: int) -> Chip:
        return cls(capability, multiprocessors, capability >= 89 and not INTERPRETED)


@cache
def chip_of_device(device: torch.device) -> Chip:
    """The chip of a CUDA device; a step asks hundreds of times."""
    properties = torch.cuda.get_device_properties(device)
    return Chip.of(10 * properties.major + properties.minor, properties.multi_processor_count)


def chip_of(x: torch.Tensor) -> Chip:
    """The chip of the device of ``x``; in the interpreter with few multiprocessors, so that splits stay small."""
    if _compiling_for is not None:
        return Chip.of(_compiling_for, 132)
    return chip_of_device(x.device) if x.is_cuda else Chip.of(_INTERPRETED_AS, _INTERPRETED_MULTIPROCESSORS)


def config_for(table: Mapping[int, Config], chip: Chip) -> Config:
    """The entry of a launch table ``{capability: configuration}`` for a chip: its own, else that of the nearest older
    one, else the oldest."""
    here = chip.capability
    if here in table:
        return table[here]
    return table[max((known for known in table if known <= here), default=min(table))]


def dot_precision(dtype: torch.dtype) -> str:
    """``input_precision`` of a product: float32 operands keep float32's precision (Triton's default rounds to tf32)."""
    return "ieee" if dtype == torch.float32 else "tf32"


def use_references(*, always: bool) -> None:
    """Lets every operation of this process run its reference from now on, or its kernel again; not those under
    :func:`batch_invariance`, which are of an engine that was started with its kernels."""
    global _references_always
    _references_always = always


def runs_references() -> bool:
    """Whether operations of this thread run their references."""
    return _of_thread.references or (_references_always and not _of_thread.batch_invariant)


@contextmanager
def references() -> Iterator[None]:
    """Within, every operation of this thread runs its reference."""
    before, _of_thread.references = _of_thread.references, True
    try:
        yield
    finally:
        _of_thread.references = before


def is_batch_invariant() -> bool:
    """Whether operations of this thread take forms, tiles and orders of sums that do not follow from the number of
    rows, so that a row's result is the same bits beside any other rows."""
    return _of_thread.batch_invariant


@contextmanager
def batch_invariance(on: bool) -> Iterator[None]:
    """Within, :func:`is_batch_invariant` is ``on`` in this thread."""
    before, _of_thread.batch_invariant = _of_thread.batch_invariant, on
    try:
        yield
    finally:
        _of_thread.batch_invariant = before


@contextmanager
def compiling_for(target: int) -> Iterator[None]:
    """Within, operations launch their kernels for CPU tensors as if those lay on a chip of this capability.

    Only of use with a driver that compiles and does not launch (`scripts/kernel_bench/compile_only.py`).
    """
    global _compiling_for
    before, _compiling_for = _compiling_for, target
    try:
        yield
    finally:
        _compiling_for = before
