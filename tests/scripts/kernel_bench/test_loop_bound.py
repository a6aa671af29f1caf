"""Loops in machine code, and their bounds, computed by hand."""

from __future__ import annotations

import pytest

from machine_code.ceiling import upper_bound
from machine_code.chip_rates import RATES, lane_cycles, memory_bytes
from machine_code.loop_bound import Product, loop_bound, main_loop, product
from machine_code.sass import Instruction, instructions, loops

# As cuobjdump prints it, shortened: a loop of products around one that waits, a part that is not always run, and at the
# end what is seldom needed, from where the code jumps back into the loop.
HOPPER = """
		Function : some_kernel
        /*0000*/                   S2R R0, SR_TID.X ;                       /* 0x0000000000007919 */
                                                                            /* 0x000e220000002100 */
        /*0010*/                   LDS.128 R4, [R0] ;                       /* 0x0 */
        /*0020*/                   HGMMA.64x32x16.F32.BF16 R168, gdesc[UR56], RZ, !UPT ;
        /*0030*/                   HGMMA.64x256x16.F32.BF16 R24, R4, gdesc[UR8], R24 ;
        /*0040*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R3 ;
        /*0050*/              @!P0 BRA 0x40 ;
        /*0060*/               @P1 BRA 0x90 ;
        /*0070*/                   LDGSTS.E.BYPASS.LTC128B.128 [R8], desc[UR4][R8.64] ;
        /*0080*/                   MUFU.EX2 R9, R9 ;
        /*0090*/               @P3 BRA 0x0100 ;
        /*00a0*/                   FFMA R8, R8, R9, R10 ;
        /*00b0*/                   IMAD.MOV.U32 R11, RZ, RZ, R8 ;
        /*00c0*/                   MUFU.EX2 R10, R11 ;
        /*00d0*/               @P2 BRA 0x10 ;
        /*00e0*/                   STG.E.128 [R2], R4 ;
        /*00f0*/                   EXIT ;
        /*0100*/                   NOP ;
        /*0110*/                   BRA 0xa0 ;
        /*0120*/                   BRA 0x120;
"""


def test_loops() -> None:
    code = instructions(HOPPER)
    assert [i.address for i in code] == list(range(0, 0x130, 16))
    products, waits = loops(code)
    assert [i.opcode.split(".")[0] for i in products.body][-2:] == ["NOP", "BRA"], (
        "the code after it is part of the loop"
    )
    assert {i.address for i in products.body} == {*range(0x10, 0xE0, 16), 0x100, 0x110}
    assert {i.address for i in products.always} == {*range(0x10, 0x70, 16), *range(0x90, 0xE0, 16)}
    assert [i.address for i in waits.body] == [0x40, 0x50]
    assert main_loop(code) == products


def test_a_bound_by_hand() -> None:
    bound = loop_bound(HOPPER, warps=8, capability=90)
    # Each of the two warpgroups: 64·32·16 and 64·256·16 multiplications, of 2048 a cycle.
    # Shared memory: (64 + 32)·16·2 bytes, as A has no register; 256·16·2; and 16 bytes for each thread that loads.
    assert bound == {
        "loop": True,
        "instructions": 11,
        "products": {"64x32x16 of 16 bits": 2, "64x256x16 of 16 bits": 2},
        "operations": 2 * 2 * 64 * (32 + 256) * 16,
        "cycles": {
            "tensor": 2 * 16 + 2 * 128.0,
            "memory": round(8 * 32 * 16 / 4.8e12 * 989e12 / 4096, 1),  # asked for in a part that is not always run
            "shared": 2 * 24 + 2 * 64 + 8 * 4.0,
            "fma": 2 * 8 / 4,
            "half": 0.0,
            "alu": 0.0,
            "logic": 0.0,
            "imad": 8 / 2,
            "special": 8 * 2.0,
            "convert": 0.0,
            "shuffle": 0.0,
            "issue": 11 * 8 / 4,
        },
        "spills": 0,
    }
    small = HOPPER.replace("HGMMA.64x256x16.F32.BF16 R24, R4, gdesc[UR8], R24", "LDSM.16.M88.4 R4, [R3]")
    bound = loop_bound(small.replace("LDGSTS.E.BYPASS.LTC128B.128", "LDL"), warps=4, capability=90)
    assert bound["spills"] == 1 and bound["cycles"]["memory"] == 0
    assert bound["cycles"]["shared"] == 24 + 4 * 4 + 4 * 4
    assert upper_bound(bound, 1e6, 1.0, 90) == {"ceiling": "tensor", "limit": "shared", "share": round(16 / 56, 3)}


def test_the_ceiling_is_the_cases_matter() -> None:
    """By the roofline: a unit that takes 128 cycles for products of 64 cycles, and 40 lines of 128 bytes."""
    cycles = {"tensor": 64.0, "memory": 40 * 128 / RATES[90].memory, "alu": 128.0}
    bound = {"operations": 64 * 4096, "cycles": cycles}
    ridge = 989e12 / 4.8e12  # operations a byte
    assert upper_bound(bound, 1.01 * ridge, 1.0, 90) == {"ceiling": "tensor", "limit": "alu", "share": 0.5}
    # Just left of it memory takes as long as the products, however much the loop asks for: the rest is in a cache.
    assert upper_bound(bound, 0.99 * ridge, 1.0, 90) == {"ceiling": "memory", "limit": "alu", "share": 0.505}
    # Where a case needs most bytes it is no more than the loop asks for; here that takes longest.
    assert upper_bound(bound, 1.0, 1.0, 90) == {"ceiling": "memory", "limit": "memory", "share": 1.0}
    assert upper_bound(bound, 0.0, 1.0, 90) == {"ceiling": "memory", "limit": "memory", "share": 1.0}
    without = {"operations": 0, "cycles": cycles | {"tensor": 0.0, "memory": 32.0}}
    assert upper_bound(without, 5e9, 1.0, 90) == {"ceiling": "memory", "limit": "alu", "share": 0.25}
    still = {"operations": 0, "cycles": {"tensor": 0.0, "memory": 0.0, "alu": 8.0}}
    assert upper_bound(still, 0.0, 1.0, 90) == {"ceiling": "memory", "limit": "alu", "share": None}


@pytest.mark.parametrize(
    ("opcode", "moved"),
    [
        ("LDG.E.128", 512),
        ("LDG.E.U16.CONSTANT", 64),
        ("LDG.E", 128),
        ("LDGSTS.E.BYPASS.LTC128B.128", 512),
        ("STG.E.U8", 32),
        ("RED.E.ADD.F32.FTZ.RN.STRONG.GPU", 128),
        ("LDS.128", 0),
        ("LDGDEPBAR", 0),
    ],
)
def test_global_memory(opcode: str, moved: int) -> None:
    assert memory_bytes(opcode) == moved


@pytest.mark.parametrize(
    ("opcode", "busy"),
    [
        ("HADD2.F32", {"convert": 2.0}),  # 4 warps of 32, over 64 lanes
        ("HADD2.BF16_V2", {"half": 1.0}),
        ("F2FP.F16.E4M3.UNPACK_B", {"alu": 2.0}),
        ("F2F.BF16.F32", {"special": 8.0}),
        ("LOP3.LUT", {"alu": 2.0, "logic": 2.0}),
        ("IMAD.MOV.U32", {"fma": 1.0, "imad": 2.0}),
        ("FFMA2", {"fma": 2.0}),
        ("SHFL.BFLY", {"shuffle": 4.0}),
        ("BAR.SYNC", {}),
    ],
)
def test_units(opcode: str, busy: dict[str, float]) -> None:
    assert lane_cycles(opcode, 4, RATES[90]) == busy


def test_copies_without_a_size_are_named() -> None:
    with pytest.raises(ValueError, match=r"UTMALDG\.2D copies by the TMA"):
        memory_bytes("UTMALDG.2D")


def test_of_loops_without_products_the_one_that_reads() -> None:
    text = """
        /*0000*/  LDG.E.128 R4, [R2] ;
        /*0010*/  @P0 BRA 0x0 ;
        /*0020*/  FADD R0, R0, R1 ;
        /*0030*/  FADD R0, R0, R1 ;
        /*0040*/  @P0 BRA 0x20 ;
        /*0050*/  EXIT ;
    """
    assert loop_bound(text, warps=4, capability=90)["instructions"] == 2


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("QGMMA.64x128x32.F32.E4M3.E4M3 R24, gdesc[UR8], R24", (64, 128, 32, 1, 4, (64 + 128) * 32)),
        ("HGMMA.64x8x8.F32.TF32 R24, R4, gdesc[UR8], R24", (64, 8, 8, 4, 4, 8 * 8 * 4)),
        ("HMMA.16816.F32.BF16 R4, R8, R10, R4", (16, 8, 16, 2, 1, 0)),
        ("IMMA.16832.S8.S8 R4, R8, R10, R4", (16, 8, 32, 1, 1, 0)),
        ("HMMA.1688.F32.TF32 R4, R8, R10, R4", (16, 8, 8, 4, 1, 0)),
        ("FFMA R8, R8, R9, R10", None),
        ("R2UR UR4, R2", None),
    ],
)  # fmt: skip
def test_products(text: str, expected: tuple[int, ...] | None) -> None:
    opcode, _, operands = text.partition(" ")
    assert product(Instruction(0, "", opcode, operands), {}) == (None if expected is None else Product(*expected))


def test_blackwells_products_have_their_shape_in_a_register() -> None:
    text = """
        /*0000*/  UMOV UR17, 0x4080490 ;
        /*0010*/  UTCHMMA gdesc[UR30], gdesc[UR58], tmem[UR67], tmem[UR16], idesc[UR17], !UPT ;
        /*0020*/  UMOV UR17, 0x8200490 ;
        /*0030*/  UTCHMMA tmem[UR30], gdesc[UR58], tmem[UR67], tmem[UR16], idesc[UR17], UPT ;
        /*0040*/  @P0 BRA 0x0 ;
    """
    bound = loop_bound(text, warps=4, capability=100)
    assert bound["products"] == {"64x32x16 of 16 bits": 1, "128x128x16 of 16 bits": 1}
    assert bound["cycles"]["tensor"] == (64 * 32 + 128 * 128) * 16 * 2 / RATES[100].tensor
    assert bound["cycles"]["shared"] == (64 + 32 + 128) * 16 * 2 / 128


def test_code_without_loops_and_products() -> None:
    bound = loop_bound("/*0000*/ FADD R0, R0, R1 ;\n/*0010*/ EXIT ;\n/*0020*/ BRA 0x20;", warps=4, capability=80)
    assert not bound["loop"] and bound["products"] == {} and bound["cycles"]["fma"] == 2.0
    with pytest.raises(ValueError, match="cuobjdump -sass"):
        instructions("Fatbin elf code:")
