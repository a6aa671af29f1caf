"""Memory that kernels touch in the interpreter: every launch of the tests is checked for what a GPU does not forgive.

    address   each one that is read or written lies in a tensor that the launch was given, between its first and its
              last element
    threads   no element that a program writes is touched by others of its threads, with no barrier between
    programs  no element that a program writes is touched by other programs, unless one counts itself through by an
              atomic, after a barrier, and the other touches it after its own

The interpreter runs one program after the other, here in a random order, and a program's threads together. So accesses
are listed, and judged when the launch has ended. Two accesses are taken for the same thread's where they have the same
position in blocks of the same shape: the compiler gives those the same thread, as far as it chooses the same layout.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Any, NamedTuple

import numpy as np

# Its programs share a table on purpose, and a row that two of them ask for may have the hot row of either
# (kernels/rows/resolve_rows.py): whatever the order, no program finds a row of another request.
SHARES_A_TABLE = {"resolve_rows_kernel"}


class _Access(NamedTuple):
    """A load or store of a block."""

    pointers: np.ndarray  # uint64: address of each element's first byte
    mask: np.ndarray  # of the same shape
    size: int  # bytes of an element
    region: int  # of the tensors, in which they lie
    writes: bool
    program: int
    barriers: int  # that the program had passed
    atomics: int  # that it had executed


class Launch:
    """What the programs of one launch touch."""

    def __init__(self, name: str, tensors: list[Any]):
        self.name = name
        regions: list[list[int]] = []  # tensors that overlap are one
        for start, end in sorted((t.data_ptr(), t.data_ptr() + _bytes_from_first_to_last(t)) for t in tensors):
            if regions and start < regions[-1][1]:
                regions[-1][1] = max(end, regions[-1][1])
            else:
                regions.append([start, end])
        self._starts, self._ends = [start for start, _ in regions], [end for _, end in regions]
        self._accesses: list[_Access] = []
        self._atomics: dict[int, list[int]] = {}  # by program: barriers passed before each
        self.program = self.barriers = 0

    def begin(self, program: int) -> None:
        self.program, self.barriers = program, 0

    def access(self, pointers: Any, mask: np.ndarray, *, writes: bool) -> None:
        size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        mask = np.broadcast_to(mask.astype(bool), pointers.data.shape)
        taken = pointers.data[mask]
        if not taken.size:
            return
        low, high = int(taken.min()), int(taken.max())
        region = bisect_right(self._starts, low) - 1
        if region < 0 or high + size > self._ends[region]:  # no block lies in several
            verb = "writes" if writes else "reads"
            raise IndexError(f"{self.name} {verb} {low:#x} to {high:#x} of tensors {self._starts} to {self._ends}")
        atomics = len(self._atomics.get(self.program, ()))
        self._accesses.append(_Access(pointers.data, mask, size, region, writes, self.program, self.barriers, atomics))

    def atomic(self, pointers: Any, mask: np.ndarray) -> None:
        listed = len(self._accesses)
        self.access(pointers, mask, writes=False)
        del self._accesses[listed:]  # what atomics change is no race
        self._atomics.setdefault(self.program, []).append(self.barriers)

    def check(self) -> None:
        """Raises ``AssertionError`` if threads or programs race."""
        if self.name in SHARES_A_TABLE:
            return
        for region in {one.region for one in self._accesses if one.writes}:
            start = self._starts[region]
            shapes: dict[tuple[int, ...], int] = {}
            here = [one for one in self._accesses if one.region == region]
            bytes_of = [_bytes(one, start) for one in here]
            is_written = np.zeros(self._ends[region] - start, bool)
            for one, at in zip(here, bytes_of, strict=True):
                if one.writes:
                    is_written[at] = True
            columns = []
            for number, (one, at) in enumerate(zip(here, bytes_of, strict=True)):
                touched = is_written[at]
                positions = np.flatnonzero(one.mask) + (shapes.setdefault(one.mask.shape, len(shapes)) << 40)
                columns.append((at[touched], np.repeat(positions, one.size)[touched], np.full(touched.sum(), number)))
            byte, position, numbers = (np.concatenate(column) for column in zip(*columns, strict=True))
            order = np.lexsort((numbers, byte))
            self._check(here, byte[order], position[order], numbers[order])

    def _check(self, here: list[_Access], at: np.ndarray, position: np.ndarray, number: np.ndarray) -> None:
        """``at``, ``position``, ``number``: by address and then as they came, the address of a byte, its position in
        the block, and the number of its access among those ``here``."""
        facts = np.array([(one.writes, one.program, one.barriers, one.atomics, self._released(one)) for one in here])
        writes, program, barriers, atomics, released = facts[number].T
        # Each access beside the last write before it, and each write beside the last access before it.
        begins = np.maximum.accumulate(np.where(np.r_[True, at[1:] != at[:-1]], np.arange(len(at)), 0))
        last_write = np.maximum.accumulate(np.where(writes > 0, np.arange(len(at)), -1))
        last_write = np.r_[-1, last_write[:-1]]
        for before, judged in ((last_write, True), (np.arange(len(at)) - 1, writes > 0)):
            pair = (before >= begins) & judged
            same = pair & (program == program[before])
            threads = same & (barriers == barriers[before]) & (position != position[before])
            programs = pair & ~same & ~((released[before] > 0) & (atomics > 0))
            for races, whose in ((threads, "threads of a program"), (programs, "programs")):
                if races.any():
                    raise AssertionError(f"{self.name}: {whose} race for {races.sum()} bytes of what it writes")

    def _released(self, one: _Access) -> bool:
        """Whether the program counts itself through after it, with a barrier between."""
        later = self._atomics.get(one.program, [])[one.atomics :]
        return any(barriers > one.barriers for barriers in later)


def _bytes(one: _Access, start: int) -> np.ndarray:
    """The number of each byte from ``start`` on."""
    return ((one.pointers[one.mask] - start).astype(np.int64)[:, None] + np.arange(one.size)).ravel()


def _bytes_from_first_to_last(tensor: Any) -> int:
    if not tensor.numel():
        return 0
    steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (steps + 1) * tensor.element_size()
