"""How near to the tensor cores' ceiling a kernel's inner loop *can* come: a bound from its machine code, not measured.

Each time round, every part of a multiprocessor has so much to do, and at best all work at the same time: the loop takes
at least as long as the busiest. The share of the ceiling is at most the tensor cores' time over that. Waiting, bank
conflicts, memory and the rest of the kernel are in no figure, so a kernel may be far slower than its bound.

Of the loop only what runs each time round counts, and products wherever they stand in it. Predicates count as true, and
the threads of a warp as reading different words of shared memory. What no rate is known for takes an issue slot only.

Rates are those of one multiprocessor and clock cycle: of tensor cores NVIDIA's data sheets (dense, over
multiprocessors and boost clock; A100, H100 SXM, B200, RTX PRO 6000), else "Arithmetic Instructions" in the CUDA
programming guide. A warpgroup's product reads B, and A where it is no register, once from shared memory.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from dsa_engine.measure.kernel_cases.sass import Instruction, Loop, instructions, loops

SHARED_BYTES = 128  # a cycle, read or written
ISSUED = 4  # instructions a cycle, of warps


@dataclass(frozen=True)
class Rates:
    """Of a multiprocessor and cycle: operations of the tensor cores (a multiplication and an addition are two) on
    numbers of 2 bytes, twice as many on one byte, half as many on 4; and lanes of the other units."""

    tensor: int
    fma: int  # float32
    alu: int  # integer additions, logic, comparisons, selection


RATES = {80: Rates(2048, 64, 64), 90: Rates(4096, 128, 64), 100: Rates(8192, 128, 64), 120: Rates(1024, 128, 128)}
_SPECIAL = 16  # lanes: exponential, logarithm, reciprocal; conversions between whole and floating-point numbers
_IMAD = 64  # lanes: products of whole numbers

_UNITS = {
    "fma": "FFMA FMUL FADD FFMA2 FMUL2 FADD2 HFMA2 HADD2 HMUL2 IMAD",
    "imad": "IMAD",
    "alu": "IADD IADD3 VIADD LOP3 SHF SEL FSEL FMNMX FMNMX3 FSETP ISETP VIMNMX VIMNMX3 VIADDMNMX LEA PRMT I2FP F2FP "
    "PLOP3 IABS SGXT BMSK FSET IMNMX",
    "special": "MUFU F2I I2F F2F FRND POPC FLO BREV",
}
_UNIT_OF = {opcode: [unit for unit, names in _UNITS.items() if opcode in names.split()] for opcode in
            {name for names in _UNITS.values() for name in names.split()}}  # fmt: skip


@dataclass(frozen=True)
class Product:
    """One tensor-core instruction: ``[rows, depth] × [depth, columns]`` of numbers of so many bytes."""

    rows: int
    columns: int
    depth: int
    number: int
    warps: int  # that issue it together; 0: one thread for the whole program
    shared: int  # bytes that it reads from shared memory itself

    @property
    def operations(self) -> int:
        return 2 * self.rows * self.columns * self.depth

    def __str__(self) -> str:
        return f"{self.rows}x{self.columns}x{self.depth} of {8 * self.number} bits"


def loop_bound(sass: str, warps: int, capability: int) -> dict[str, Any]:
    """The bound of the loop that matters (:func:`main_loop`), or of the whole code where there is no loop.

    Args:
        sass: what ``cuobjdump -sass`` prints.
        warps: of a program.
        capability: as in ``sm_90``, one of :data:`RATES`.

    Returns:
        ``loop``: whether it is one; ``instructions`` of a warp each time round; ``products`` with how often a program
        issues each; ``cycles`` at least, by unit; ``limit``: the unit that takes longest; ``tensor_share``: at most
        this share of the tensor cores' ceiling, None without products; ``spills``: loads and stores of registers that
        there was no room for, in the loop.
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
    cycles = _cycles(always, warps, RATES[capability])
    cycles["tensor"] = sum(n * p.operations * p.number / 2 for p, n in made_by.items()) / RATES[capability].tensor
    cycles["shared"] += sum(n * p.shared for p, n in made_by.items()) / SHARED_BYTES
    limit = max(cycles, key=lambda unit: cycles[unit])
    return {
        "loop": loop is not None,
        "instructions": len(always),
        "products": {str(each): n for each, n in made_by.items()},
        "cycles": {unit: round(taken, 1) for unit, taken in cycles.items()},
        "limit": limit,
        "tensor_share": round(cycles["tensor"] / cycles[limit], 3) if made_by else None,
        "spills": sum(i.opcode.startswith(("LDL", "STL")) for i in body),
    }


def main_loop(code: Sequence[Instruction]) -> Loop | None:
    """Of the innermost loops with products the one with most operations; without products the longest innermost one
    that does more than wait; None without loops."""
    descriptors = _descriptors(code)
    found = [(loop, sum(_operations(i, descriptors) for i in loop.body)) for loop in loops(code)]
    found = [each for each in found if each[1]] or [
        each for each in found if not any(i.opcode.startswith(("SYNCS", "NANOSLEEP")) for i in each[0].body)
    ]
    inner = [
        each for each in found
        if not any(set(other.body) < set(each[0].body) for other, _ in found)
    ]  # fmt: skip
    return max(inner, key=lambda each: (each[1], len(each[0].body)))[0] if inner else None


def product(instruction: Instruction, descriptors: dict[int, int]) -> Product | None:
    """What a tensor-core instruction multiplies; None for any other. ``descriptors``: of Blackwell's, by address."""
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
    """By address of each product with one, its instruction descriptor: what was last moved to the register named."""
    moved: dict[str, int] = {}
    found = {}
    for instruction in code:
        if instruction.opcode in ("UMOV", "UMOV.64"):
            register, _, value = instruction.operands.partition(", ")
            if re.fullmatch(r"0x[0-9a-f]+", value.strip()):
                moved[register] = int(value, 16)
        elif named := re.search(r"idesc\[(UR\d+)\]", instruction.operands):
            found[instruction.address] = moved.get(named[1], 0)
    return found


def _cycles(always: Iterable[Instruction], warps: int, rates: Rates) -> dict[str, float]:
    lanes = {"fma": rates.fma, "imad": _IMAD, "alu": rates.alu, "special": _SPECIAL}
    cycles = dict.fromkeys(("tensor", "shared", *lanes, "issue"), 0.0)
    for instruction in always:
        base = instruction.opcode.split(".")[0]
        cycles["issue"] += warps / ISSUED
        for unit in _UNIT_OF.get(base, ()):
            cycles[unit] += warps * 32 / lanes[unit] * (2 if base.endswith("A2") and base.startswith("FF") else 1)
        cycles["shared"] += warps * _shared_bytes(instruction.opcode) / SHARED_BYTES
    return cycles


def _shared_bytes(opcode: str) -> int:
    """That an instruction of a warp reads from shared memory or writes to it; at least a cycle's."""
    base, *words = opcode.split(".")
    if base in ("LDSM", "STSM"):  # matrices of 8 × 8 numbers of 2 bytes
        return SHARED_BYTES * next((int(word) for word in words if word in ("2", "4")), 1)
    if base in ("LDS", "STS", "LDGSTS", "ATOMS"):
        return SHARED_BYTES * next((int(word) // 32 for word in words if word in ("64", "128")), 1)
    return 0
