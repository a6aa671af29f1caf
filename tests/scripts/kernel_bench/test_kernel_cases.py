"""Compilation of the kernels for chips that are not present, and their benchmark."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from bench_kernels import measure, rows
from compile_only import spills_in_loops
from dsa_engine.kernels.runtime.launch import INTERPRETED
from dsa_engine.measure.ceilings import Ceilings
from inspect_kernels import Inspection, faults, inspect
from kernel_cases import CASES
from kernel_cases.inputs import KernelCase

ROOT = Path(__file__).resolve().parents[3]
compiles = pytest.mark.skipif(INTERPRETED, reason="nothing can be compiled under TRITON_INTERPRET=1")


def test_every_kernel_has_a_case() -> None:
    """A kernel that no case launches would be neither inspected nor measured."""
    sources = (path.read_text(encoding="utf-8") for path in (ROOT / "kernels").rglob("*.py"))
    marked = r"^@(?:kernel|gluon\.jit).*\ndef (\w+_kernel)\("
    written = {name for text in sources for name in re.findall(marked, text, re.M)}
    table = (ROOT / "benchmarks" / "results" / "kernels_compiled.txt").read_text(encoding="utf-8")
    assert len(written) > 20
    assert written == set(re.findall(r"^(\w+_kernel) ", table, re.M))


@cache
def compiled(name: str, capability: int) -> Inspection:
    """Compiling takes seconds, and several tests look at the same kernels."""
    return inspect(capability, [name])


def assert_sound(name: str, capability: int, spilled: int = 0) -> None:
    """No faults, except for a maximum number of spilled bytes per thread."""
    kernels, missing = compiled(name, capability)
    assert kernels or (name.startswith("variant") and missing)
    assert all(capability == 80 and re.search("needs instructions of sm_(89|90)$", reason) for reason in missing)
    for kernel, case in kernels:
        print(kernel)
        assert kernel.spilled <= spilled and not kernel.looped
        assert faults(kernel._replace(spilled=0), case.product, capability) == []


@compiles
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.slow] * n.startswith(("experts", "linear", "variant"))) for n in CASES],
)
def test_kernels_fit_hopper(name: str) -> None:
    """No spills, shared memory within the limit, products by wgmma, at production sizes."""
    assert_sound(name, 90)


@compiles
@pytest.mark.parametrize("name", ["sparse_prefill", "sparse_decode", "dense_decode"])
def test_attention_divides_its_products(name: str) -> None:
    """With 64 heads the compiler can give both warpgroups the same product (76 wgmma instead of 40): it does not,
    thanks to what `online_softmax.attend` says."""
    others = "merge_splits_kernel", "gather_latent_kernel"
    products = [kernel for kernel, _ in compiled(name, 90).kernels if kernel.kernel not in others]
    gluon = [kernel for kernel in products if kernel.kernel == "sparse_prefill_kernel"]
    assert products and all(0 < kernel.wgmma <= 40 for kernel in products if kernel not in gluon)
    # Its 36 of scores, and 4 of each half of the values; 128 and 64 heads.
    assert [kernel.wgmma for kernel in gluon] == ([44, 44] if name == "sparse_prefill" else [])


@compiles
def test_fp8_is_multiplied_as_fp8() -> None:
    """By wgmma of e4m3 operands, without spills; nothing is converted on the way."""
    products = [kernel for kernel, _ in compiled("linear", 90).kernels if kernel.kernel.startswith("block_scaled")]
    assert products
    for kernel in products:
        assert kernel.fp8 == kernel.wgmma > 0 and kernel.mma == kernel.spilled == 0


@compiles
def test_two_scoring_programs_share_a_multiprocessor() -> None:
    """One multiplies while the other weighs and sums: half of the registers and of the shared memory each."""
    for kernel, _ in compiled("indexer_prefill", 90).kernels:
        assert kernel.registers * 32 * kernel.warps * 2 <= 65536
        assert 2 * (kernel.shared + 1024) <= 228 << 10


@compiles
@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 100, 120])
@pytest.mark.parametrize("name", CASES)
def test_kernels_fit_other_chips(name: str, capability: int) -> None:
    """They compile and fit; a few registers too many for a tile that was chosen for Hopper are tolerated."""
    assert_sound(name, capability, spilled=128)


STEP = "/*{:04x}*/ FADD R0, R0, R1 ;"


@pytest.mark.parametrize(("spilling", "counted"), [(5, 0), (40, 1), (60, 0), (70, 0)])
def test_spills_in_innermost_loops(spilling: int, counted: int) -> None:
    """A loop over tiles from 3 to 64, in it one of products from 32 to 56, and before that a wait, whose retry lies
    behind the end and comes back to 24."""
    code = [STEP.format(16 * number) for number in range(80)]
    jumps = {23: "@!P0 BRA 0x460", 56: "@P1 BRA 0x200", 64: "@P2 BRA 0x30", 66: "EXIT", 71: "@!P0 BRA 0x460",
             72: "BRA 0x180", 79: "BRA 0x4f0"}  # fmt: skip
    for number, jump in jumps.items():
        code[number] = f"/*{16 * number:04x}*/ {jump} ;"
    code[spilling] = f"/*{16 * spilling:04x}*/ @P3 LDL.LU R3, [R1+0x8] ;"
    assert spills_in_loops("\n".join(code)) == counted


def test_a_measurement() -> None:
    def out_of_order() -> None:
        raise RuntimeError("no such kernel\nand a long trace")

    x = torch.ones(1000)
    baselines: dict[str, Any] = {"sum": x.sum, "broken": out_of_order}
    case = KernelCase("add", "1000", lambda: x + x, bytes=8e3, flops=1e3, baselines=baselines)
    result = measure(case, Ceilings(flops_per_s=1e12, bytes_per_s=1e9), torch.device("cpu"))
    assert result["share_of_ceiling"] == pytest.approx(8e-6 / (result["ms"] / 1e3))
    assert result["gb_per_s"] == pytest.approx(8e3 / (result["ms"] / 1e3) / 1e9)
    assert result["baselines"]["sum"]["times_ours"] == pytest.approx(result["baselines"]["sum"]["ms"] / result["ms"])
    assert result["baselines"]["broken"] == {"skipped": "RuntimeError: no such kernel"}
    (row,) = rows([result])
    assert row[0] == "add" and "of copy" in str(row[4]) and "broken: RuntimeError" in str(row[5])


@pytest.mark.parametrize(
    "names",
    ["sparse_decode,top_k,indexer_prefill", pytest.param(None, marks=pytest.mark.slow)],
    ids=["some", "all"],
)
def test_the_benchmark_on_a_cpu(run_script: Callable[..., Any], tmp_path: Path, names: str | None) -> None:
    """Every case runs at small sizes, beside its reference."""
    only = ["--only", names] if names else []
    small = ["--small", "--device", "cpu", "--dtype", "float32", "--json", str(tmp_path / "k.json")]
    done = run_script("kernel_bench/bench_kernels.py", *small, *only)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "k.json").read_text())
    assert result["left_out"] == [] and result["dtype"] == "float32" and "device" in result
    assert {r["kernel"].partition(",")[0] for r in result["results"]} >= {"indexer scores", "top-k", "sparse attention"}
    for r in result["results"]:
        assert r["ms"] > 0 and r["share_of_ceiling"] > 0, r
        assert not [b for b in r["baselines"].values() if "skipped" in b], r
    assert "ceilings:" in done.stdout and "of matmul" in done.stdout and "of copy" in done.stdout


@compiles
def test_inspection_report(run_script: Callable[..., Any]) -> None:
    done = run_script("kernel_bench/inspect_kernels.py", "--only", "top_k")
    assert done.returncode == 0, done.stderr
    assert "sm_90" in done.stdout and "_kernel" in done.stdout and "not compiled" not in done.stdout
