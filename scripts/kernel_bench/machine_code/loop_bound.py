"""Work of a kernel's inner loop for each unit of a multiprocessor, counted in its machine code (SASS).

At best all units work at the same time, so an iteration takes at least as long as the busiest unit (`ceiling.py`
compares it with a ceiling). Waits, bank conflicts and the rest of the kernel are not counted, so a kernel may be far
slower than its bound.

Instructions count if they run in each iteration; products and accesses to global memory count anywhere in the loop.
Predicates count as true, and the threads of a warp as reading different words. Instructions without a known rate
(rates and sources: `chip_rates.py`) only take an issue slot.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from machine_code.chip_rates import (
    ISSUED,
    RATES,
    SHARED_BYTES,
    Rates,
    lane_cycles,
    memory_bytes,
    shared_bytes,
)
from machine_code.sass import Instruction, Loop, instructions, loops


@dataclass(frozen=True)
class Product:
    """One tensor-core instruction: ``[rows, depth] × [depth, columns]`` of numbers of so many bytes."""

    rows: int
    columns: int
    depth: int
    number: int
    warps: int  # warps that issue it together; 0: one thread for the whole program
    shared: int  # bytes that the instruction reads from shared memory

    @property
    def operations(self) -> int:
        return 2 * self.rows * self.columns * self.depth

    def __str__(self) -> str:
        return f"{self.rows}x{self.columns}x{self.depth} of {8 * self.number} bits"


def loop_bound(sass: str, warps: int, capability: int) -> dict[str, Any]:
    """The bound of the main loop (:func:`main_loop`), or of the whole code if there is no loop.

    Args:
        sass: output of ``cuobjdump -sass``.
        warps: number of warps of a program.
        capability: such as 90 for ``sm_90``, one of :data:`.RATES`.

    Returns:
        ``loop``: whether there is a loop; ``instructions`` of a warp per iteration; ``products`` and how often a
        program issues each, and their ``operations``; minimum ``cycles`` by unit ("memory": all accesses to global
        memory, cached or not); ``spills``: loads and stores of spilled registers in the loop.
    """
    code = instructions(sass)
    loop = main_loop(code)
    body, always = (loop.body, loop.always) if loop else (tuple(code), tuple(code))
    descriptors = _descriptors(code)
    issued: Counter[Product] = Counter()
    for instruction in body:
        if made := product(instruction, descriptors):
            issued[made] += 1
    made_by = {each: n * (warps // each.warps if each.warps else 1) for each, n in issued.items()}
    rates = RATES[capability]
    cycles = {"tensor": sum(n * p.operations * p.number / 2 for p, n in made_by.items()) / rates.tensor}
    cycles |= {"memory": warps * sum(memory_bytes(i.opcode) for i in body) / rates.memory}
    cycles |= _cycles(always, warps, rates)
    cycles["shared"] += sum(n * p.shared for p, n in made_by.items()) / SHARED_BYTES
    return {
        "loop": loop is not None,
        "instructions": len(always),
        "products": {str(each): n for each, n in made_by.items()},
        "operations": sum(n * p.operations for p, n in made_by.items()),
        "cycles": {unit: round(taken, 1) for unit, taken in cycles.items()},
        "spills": sum(i.opcode.startswith(("LDL", "STL")) for i in body),
    }


def main_loop(code: Sequence[Instruction]) -> Loop | None:
    """The innermost loop with the most operations; without products, of the loops that do more than wait, the one that
    moves the most global memory, or the longest; None without loops."""
    descriptors = _descriptors(code)
    candidates = [(loop, sum(_operations(i, descriptors) for i in loop.body)) for loop in loops(code)]
    candidates = [each for each in candidates if each[1]] or [
        each for each in candidates if not any(i.opcode.startswith(("SYNCS", "NANOSLEEP")) for i in each[0].body)
    ]
    inner = [
        each for each in candidates
        if not any(set(other.body) < set(each[0].body) for other, _ in candidates)
    ]  # fmt: skip
    return max(inner, key=lambda each: (each[1], _moved(each[0]), len(each[0].body)))[0] if inner else None


def _moved(loop: Loop) -> int:
    return sum(memory_bytes(instruction.opcode) for instruction in loop.body)


def product(instruction: Instruction, descriptors: dict[int, int]) -> Product | None:
    """The product of a tensor-core instruction; None for any other. ``descriptors``: Blackwell's, by address."""
    base, *words = instruction.opcode.split(".")
    number = 1 if base[:-3] in ("QG", "IG", "Q", "I", "UTCQ", "UTCI", "OG", "O") else 4 if "TF32" in words else 2
    if base.endswith("GMMA"):  # a warpgroup's: HGMMA.64x256x16.F32.BF16 R24, R4, gdesc[UR8], R24
        rows, columns, depth = map(int, words[0].split("x"))
        a = 0 if re.match(r"R\d+, R\d", instruction.operands) else rows
        return Product(rows, columns, depth, number, 4, (a + columns) * depth * number)
    if base in ("HMMA", "QMMA", "IMMA"):  # a warp's: HMMA.16816.F32.BF16
        shape = next(word for word in words if re.fullmatch(r"168\d+|16816", word))
        return Product(16, 8, int(shape[3:]), number, 1, 0)
    if base.startswith("UTC") and base.endswith("MMA"):  # one for the program; its shape is in a descriptor
        bits = descriptors[instruction.address]
        rows, columns, depth = (bits >> 24 & 31) << 4, (bits >> 17 & 63) << 3, 32 // number
        a = rows if instruction.operands.count("gdesc[") == 2 else 0
        return Product(rows, columns, depth, number, 0, (a + columns) * depth * number)
    return None


def _operations(instruction: Instruction, descriptors: dict[int, int]) -> int:
    made = product(instruction, descriptors)
    return made.operations if made else 0


def _descriptors(code: Iterable[Instruction]) -> dict[int, int]:
    """Instruction descriptors by address of the product: the value last moved to the named register."""
    moved: dict[str, int] = {}
    descriptors = {}
    for instruction in code:
        if instruction.opcode in ("UMOV", "UMOV.64"):
            register, _, value = instruction.operands.partition(", ")
            if re.fullmatch(r"0x[0-9a-f]+", value.strip()):
                moved[register] = int(value, 16)
        elif named := re.search(r"idesc\[(UR\d+)\]", instruction.operands):
            descriptors[instruction.address] = moved.get(named[1], 0)
    return descriptors


def _cycles(always: Iterable[Instruction], warps: int, rates: Rates) -> dict[str, float]:
    cycles = dict.fromkeys(("shared", *rates.lanes, "issue"), 0.0)
    for instruction in always:
        cycles["issue"] += warps / ISSUED
        cycles["shared"] += warps * shared_bytes(instruction.opcode) / SHARED_BYTES
        for unit, taken in lane_cycles(instruction.opcode, warps, rates).items():
            cycles[unit] += taken
    return cycles
