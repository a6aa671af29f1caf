"""Rates of a multiprocessor per clock cycle, by compute capability, and the unit of each instruction.

Tensor cores and memory: NVIDIA's data sheets (dense products) of the A100 SXM 80 GB, H200 SXM, B200 and RTX PRO 6000
Blackwell. For Hopper it is the H200, as its memory is faster than the H100's (4.8 against 3.35 TB/s), which demands
more of the other units.

Lanes: "Throughput of Native Arithmetic Instructions", until CUDA 12 in the programming guide and since 13 in the best
practices guide: float32, integer addition, multiplication and logic, MUFU, shuffles, pairs of 16-bit numbers,
conversions from 16 to 32 bits (HADD2.F32), from 8 bits (F2FP.UNPACK) and by F2F. That F2FP to 16 bits belongs to the
ALU is from Nsight Compute's description of its pipelines. Assumed, as no source was found: F2FP to 8 bits and I2FP as
F2FP to 16 bits; F2I and I2F as F2F. The guide has F2I at 2 lanes on 12.0, and float32 minima at 128 on 10.0, which are
counted here with the ALU's 64.

Shared memory: 32 banks of 4 bytes a cycle (programming guide). That a warpgroup's product reads B, and A where it is no
register, once from there agrees with what others measured on an H100: full rate from 64 columns on. (A single warp's
products reach some 63% of that rate there; here they count as the warpgroup's.)
"""

from __future__ import annotations

from dataclasses import dataclass

from dsa_engine.commands.planner.prediction.devices import DEVICES

SHARED_BYTES = 128  # read or written per cycle
ISSUED = 4  # warp instructions per cycle


@dataclass(frozen=True)
class Rates:
    """Rates of a multiprocessor per cycle.

    Attributes:
        tensor: operations of the tensor cores (a multiplication and an addition are two) on numbers of 2 bytes; twice
            as many on one byte, half as many on 4.
        memory: bytes read or written.
        lanes: lanes of the other units, by name.
    """

    tensor: int
    memory: float
    lanes: dict[str, int]


def _rates(tensor: int, flops: float, bandwidth: float, fma: int, half: int, alu: int) -> Rates:
    """Rates from the device's ``flops`` and ``bandwidth`` per second, whose ratio holds for a multiprocessor too."""
    lanes = {"fma": fma, "half": half, "alu": alu, "logic": 64, "imad": 64, "special": 16, "convert": 64, "shuffle": 32}
    return Rates(tensor, bandwidth * tensor / flops, lanes)


def _data_sheet(name: str) -> tuple[float, float]:
    return DEVICES[name].flops, DEVICES[name].bandwidth


RATES = {
    80: _rates(2048, *_data_sheet("A100"), fma=64, half=64, alu=64),
    90: _rates(4096, *_data_sheet("H200"), fma=128, half=128, alu=64),
    100: _rates(8192, *_data_sheet("B200"), fma=128, half=64, alu=64),
    120: _rates(1024, 503.8e12, 1.792e12, fma=128, half=64, alu=128),
}

_UNITS = {
    "fma": "FFMA FMUL FADD FFMA2 FMUL2 FADD2 IMAD",
    "half": "HFMA2 HADD2 HMUL2",
    "convert": "HADD2.F32",
    "imad": "IMAD",
    "alu": "IADD IADD3 VIADD LOP3 SHF SEL FSEL FMNMX FMNMX3 FSETP ISETP VIMNMX VIMNMX3 VIADDMNMX LEA PRMT I2FP F2FP "
    "PLOP3 IABS SGXT BMSK FSET IMNMX",
    "logic": "LOP3 SHF PRMT",
    "special": "MUFU F2I I2F F2F FRND POPC FLO BREV",
    "shuffle": "SHFL",
}
UNITS_OF = {opcode: [unit for unit, names in _UNITS.items() if opcode in names.split()] for opcode in
            {name for names in _UNITS.values() for name in names.split()}}  # fmt: skip


def lane_cycles(opcode: str, warps: int, rates: Rates) -> dict[str, float]:
    """Cycles for which an instruction of so many warps keeps each unit busy."""
    base = opcode.split(".")[0]
    name = "HADD2.F32" if opcode.startswith("HADD2.F32") else base
    pairs = 2 if base in ("FFMA2", "FADD2", "FMUL2") else 1  # two float32 per lane
    return {unit: warps * 32 * pairs / rates.lanes[unit] for unit in UNITS_OF.get(name, ())}


def shared_bytes(opcode: str) -> int:
    """Bytes that an instruction of a warp reads from or writes to shared memory; at least those of a cycle."""
    base, *words = opcode.split(".")
    if base in ("LDSM", "STSM"):  # matrices of 8 × 8 numbers of 2 bytes
        return SHARED_BYTES * next((int(word) for word in words if word in ("2", "4")), 1)
    if base in ("LDS", "STS", "LDGSTS", "ATOMS"):
        return SHARED_BYTES * _words(words)
    return 0


def memory_bytes(opcode: str) -> int:
    """Bytes that an instruction of a warp reads from or writes to global memory.

    Raises:
        ValueError: a copy by the TMA, whose size is not in the instruction; no kernel here has one.
    """
    base, *words = opcode.split(".")
    if base in ("UTMALDG", "UTMASTG", "UTMAREDG", "UBLKCP", "UBLKRED"):
        raise ValueError(f"{opcode} copies by the TMA: how many bytes is not in the code; count them from its barrier")
    if base not in ("LDG", "STG", "LDGSTS", "ATOMG", "RED", "REDG"):
        return 0
    narrow = {"U8": 32, "S8": 32, "U16": 64, "S16": 64}
    return next((narrow[word] for word in words if word in narrow), 128 * _words(words))


def _words(words: list[str]) -> int:
    """Words of 4 bytes that each thread moves."""
    return next((int(word) // 32 for word in words if word in ("64", "128", "256")), 1)
