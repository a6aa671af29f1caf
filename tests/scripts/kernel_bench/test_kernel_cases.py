"""Compilation of the kernels for chips that are not present, and their benchmark."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from dsa_engine.kernels.linear.block_scaled_matmul import block_scaled_matmul_reference
from dsa_engine.kernels.runtime.launch import INTERPRETED
from dsa_engine.measure import device
from dsa_engine.measure.ceilings import Ceilings
from dsa_engine.system import progress
from kernel_cases import bench, cases_fp8_products, cases_int
from kernel_cases.bench import KernelCase, measure, rows
from kernel_cases.cases import CASES
from kernel_cases.inputs import Inputs, Sizes
from machine_code.compile_counts import counts, renewed
from machine_code.inspection import SHARED_LIMIT, Inspection, faults, inspect

SCRIPTS = Path(__file__).resolve().parents[3] / "scripts"
compiles = pytest.mark.skipif(INTERPRETED, reason="nothing can be compiled under TRITON_INTERPRET=1")


def run(script: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPTS / script), *arguments]
    env = os.environ | {"OMP_NUM_THREADS": "1"} | environment
    return subprocess.run(command, capture_output=True, text=True, timeout=600, env=env)


def test_every_kernel_has_a_case() -> None:
    """A kernel that no case launches would be neither inspected nor measured."""
    sources = (path.read_text(encoding="utf-8") for path in (SCRIPTS.parent / "kernels").rglob("*.py"))
    written = {name for text in sources for name in re.findall(r"^@triton\.jit.*\ndef (\w+_kernel)\(", text, re.M)}
    compiled = json.loads((SCRIPTS.parent / "benchmarks" / "results" / "kernels_compiled.json").read_text())
    assert len(written) > 20
    assert written == {kernel["kernel"] for kernel in compiled["kernels"]["sm_90"]}


@cache
def compiled(name: str, capability: int) -> Inspection:
    """Compiling takes seconds, and several tests look at the same kernels."""
    return inspect(capability, [name])


def assert_sound(name: str, capability: int, spilled: int = 0) -> None:
    """No faults, except for a maximum number of spilled bytes per thread."""
    kernels, missing = compiled(name, capability)
    if (name, capability) == ("fp8_products", 80):  # Ampere has no FP8 products
        assert not kernels and missing and all("needs instructions of sm_89" in reason for reason in missing)
    else:
        assert kernels and not missing
    for kernel in kernels:
        print(kernel)
        assert kernel["spilled"] <= spilled
        assert faults(kernel | {"spilled": 0}, capability) == []


@compiles
@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in ("int4", "int8"))) for n in CASES])
def test_kernels_fit_hopper(name: str) -> None:
    """No spills, shared memory within the limit, products by wgmma, at production sizes."""
    assert_sound(name, 90)


@compiles
@pytest.mark.parametrize("name", ["sparse_prefill", "sparse_decode", "dense_decode"])
def test_attention_divides_its_products_and_overlaps_them(name: str) -> None:
    """With 64 heads the compiler can give both warpgroups the same product (76 wgmma instead of 40), and run products
    one after another (80 waits instead of 6 to 10): it does neither, thanks to what `online_softmax.attend` says."""
    for kernel in compiled(name, 90).kernels:
        if kernel["kernel"] != "merge_splits_kernel":
            assert 0 < kernel["wgmma"] <= 40
            assert kernel["warpgroup_waits"] <= 12
            # The bound from the machine code has found the loop: a step of 64 heads, and no product done twice.
            assert kernel["bound"]["loop"] and kernel["bound"]["cycles"]["tensor"] == 2 * 64 * 64 * (576 + 512) / 4096
            assert all(judged["share"] > 0.6 for judged in kernel["at_most"])


@compiles
def test_fp8_is_multiplied_as_fp8() -> None:
    """By wgmma of e4m3 operands, without spills; nothing is converted on the way."""
    products = [
        kernel for kernel in compiled("fp8_products", 90).kernels if kernel["kernel"].startswith("block_scaled")
    ]
    assert {kernel["kernel"] for kernel in products} == {"block_scaled_matmul_kernel", "block_scaled_experts_kernel"}
    for kernel in products:
        assert kernel["fp8"] == kernel["wgmma"] > 0 and kernel["mma"] == kernel["spilled"] == 0


@compiles
def test_two_scoring_programs_share_a_multiprocessor() -> None:
    """One multiplies while the other weighs and sums: half of the registers and of the shared memory each."""
    for kernel in compiled("indexer_prefill", 90).kernels:
        assert kernel["registers"] * 32 * kernel["warps"] * 2 <= 65536
        assert 2 * (kernel["shared"] + 1024) <= 228 << 10


@compiles
@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 100, 120])
@pytest.mark.parametrize("name", CASES)
def test_kernels_fit_other_chips(name: str, capability: int) -> None:
    """They compile and fit; a few registers too many for a tile that was chosen for Hopper are tolerated."""
    assert_sound(name, capability, spilled=128)


@compiles
def test_what_does_not_compile_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise RuntimeError("ptxas: no such instruction\nand a long trace")

    case = KernelCase("top-k", "3 rows", broken, flops=1.0, bytes=1.0)
    monkeypatch.setitem(CASES, "top_k", lambda make, sizes: iter([case, replace(case, kernel="later", needs=100)]))
    assert inspect(90, ["top_k"]) == (
        [],
        ["top-k: 3 rows: RuntimeError: ptxas: no such instruction", "later: needs instructions of sm_100"],
    )


def test_faults_are_named() -> None:
    sound = {"spilled": 0, "shared": SHARED_LIMIT[90], "product": True, "mma": 3, "wgmma": 4, "bound": {"spills": 2}}
    assert faults(sound, 90) == []
    assert faults(sound | {"product": False, "wgmma": 0}, 90) == []
    assert faults(sound | {"spilled": 8}, 90) == ["spills 8 bytes a thread"]
    once = sound | {"spilled": 8, "bound": {"spills": 0}}
    assert faults(once, 90) == ["spills 8 bytes a thread, outside of its inner loop"]
    assert faults(sound, 80) == ["needs 232,448 bytes of shared memory, a program has 166,912"]
    assert faults(sound | {"wgmma": 0}, 90) == ["multiplies with mma.sync instead of wgmma"]


def test_a_measurement() -> None:
    def out_of_order() -> None:
        raise RuntimeError("no such kernel\nand a long trace")

    x = torch.ones(1000)
    case = KernelCase(
        "add", "1000", lambda: x + x, flops=1e3, bytes=8e3, baselines={"sum": x.sum, "broken": out_of_order}
    )
    result = measure(case, Ceilings(flops_per_s=1e12, bytes_per_s=1e9), torch.device("cpu"))
    assert result["share_of_ceiling"] == pytest.approx(8e-6 / (result["ms"] / 1e3))
    assert result["gb_per_s"] == pytest.approx(8e3 / (result["ms"] / 1e3) / 1e9)
    assert result["baselines"]["sum"]["times_ours"] == pytest.approx(result["baselines"]["sum"]["ms"] / result["ms"])
    assert result["baselines"]["broken"] == {"skipped": "RuntimeError: no such kernel"}
    (row,) = rows([result])
    assert row[0] == "add" and "of copy" in str(row[4]) and "broken: RuntimeError" in str(row[5])


def test_quantised_products_of_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The baselines of our FP8 and INT8 products compute the same. FP8's is PyTorch's call with its arguments
    checked elsewhere (``kernels/linear/test_block_scaled_libraries.py``), as no CPU has it."""

    def scaled_mm(
        x: torch.Tensor, weight: torch.Tensor, x_scale: torch.Tensor, kind: Any, weight_scale: torch.Tensor,
        weight_kind: Any, output_dtype: torch.dtype,
    ) -> torch.Tensor:  # fmt: skip
        return block_scaled_matmul_reference(x, x_scale, weight.t(), weight_scale.t()).to(output_dtype)

    monkeypatch.setattr(F, "scaled_mm", scaled_mm, raising=False)
    monkeypatch.setattr(cases_fp8_products, "takes", lambda *_: True)
    monkeypatch.setattr(cases_fp8_products, "LAYERS", {"small": (256, 1024)})
    monkeypatch.setattr(cases_int, "O_PROJ", 512)
    monkeypatch.setattr(cases_int, "HIDDEN", 256)
    make, sizes = Inputs(torch.device("cpu"), torch.bfloat16), replace(Sizes.small(), batches=(2, 3, 4), experts=())
    fp8 = [case for case in CASES["fp8_products"](make, sizes) if case.kernel.startswith("FP8 product")]
    int8 = [case for case in CASES["int8"](make, sizes) if case.kernel.startswith("INT8 product")]
    assert len(fp8) == 4 and len(int8) == 3
    for case, name in [
        *((case, "torch scaled_mm") for case in fp8),
        *((case, "torch _int_mm, scaled") for case in int8),
    ]:
        got, wanted = case.baselines[name](), case.run()
        assert got.dtype == wanted.dtype == torch.bfloat16 and bool(got.abs().max() > 0)
        torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize(
    "names",
    ["sparse_decode,top_k,indexer_prefill", pytest.param(None, marks=pytest.mark.slow)],
    ids=["some", "all"],
)
def test_the_benchmark_on_a_cpu(run_script: Callable[..., Any], tmp_path: Path, names: str | None) -> None:
    """Every case runs at small sizes and says what it was compared with."""
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


@pytest.mark.parametrize("kernels_own", [True, False], ids=["kernel", "baseline"])
def test_a_kernel_that_loses_the_device_does_not_lose_the_others(
    run_script: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernels_own: bool
) -> None:
    """Another process measures them, and adds to the same file."""
    report, lost = tmp_path / "k.json", []

    def breaks_the_device(*args: Any) -> Any:
        lost.append(True)
        if not kernels_own:  # an error in a baseline is part of the result
            return measure(*args)
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nand advice")

    def in_another_process(command: list[str]) -> int:
        assert command[0] == sys.executable and json.loads(report.read_text())["complete"] is False
        with monkeypatch.context() as there:
            there.setattr(bench, "measure", measure)
            there.setattr(device, "is_lost", lambda device: False)
            return run_script(f"kernel_bench/{Path(command[1]).name}", *command[2:]).returncode

    measure = bench.measure
    monkeypatch.setattr(bench, "measure", breaks_the_device)
    monkeypatch.setattr(device, "is_lost", lambda device: bool(lost))
    monkeypatch.setattr(subprocess, "call", in_another_process)
    small = ["--small", "--device", "cpu", "--dtype", "float32", "--time-limit", "300", "--json", str(report)]
    done = run_script("kernel_bench/bench_kernels.py", *small, "--only", "sparse_decode,top_k")
    assert done.returncode == 1 and len(lost) == 1, done.stderr
    result = json.loads(report.read_text())
    assert result["complete"] and {r["kernel"].partition(",")[0] for r in result["results"]} == (
        {"top-k"} if kernels_own else {"top-k", "sparse attention"}
    )
    (reason,) = result["failed"].values()
    by_another = "something that it is compared with has left the device in an error"
    assert reason == "RuntimeError: " + (
        "CUDA error: an illegal memory access was encountered" if kernels_own else by_another
    )


@pytest.mark.parametrize("script", ["kernel_bench/bench_kernels.py", "kernel_bench/inspect_kernels.py"])
def test_unknown_kernel(run_script: Callable[..., Any], script: str) -> None:
    done = run_script(script, "--only", "top_k,attention", *(["--small"] if "bench_kernels" in script else []))
    assert done.returncode == 2
    assert "no kernel is named attention; --only takes some of" in done.stderr and "Traceback" not in done.stderr


def test_production_sizes_are_refused_on_a_cpu(run_script: Callable[..., Any]) -> None:
    done = run_script("kernel_bench/bench_kernels.py", "--device", "cpu")
    assert done.returncode == 2 and "add --small" in done.stderr


@compiles
def test_inspection_report(
    run_script: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr(progress, "_EVERY_S", 0.0)
    done = run_script("kernel_bench/inspect_kernels.py", "--only", "top_k", "--json", str(tmp_path / "i.json"))
    assert done.returncode == 0, done.stderr
    assert "compiling: 1 of 1 cases in " in caplog.text
    result = json.loads((tmp_path / "i.json").read_text())
    assert result["measured_on"] is None and result["versions"]["triton"]
    for kernel in result["kernels"]["sm_90"]:
        assert kernel["registers"] > 0 and kernel["faults"] == []
        assert kernel["kernel"] in done.stdout
        assert kernel["bound"]["operations"] == 0 and kernel["bound"]["cycles"]["issue"] > 0
        assert len(kernel["at_most"]) >= 1 and {judged["ceiling"] for judged in kernel["at_most"]} == {"memory"}
    assert result["not_compiled"] == {"sm_90": []}


def test_counts_of_versions_and_chips(tmp_path: Path) -> None:
    sound = {"kernel": "a", "operation": "sum", "shape": "3 rows", "spilled": 0, "bound": {"loop": True, "spills": 0}}
    spilling = sound | {"spilled": 8, "bound": {"loop": True, "spills": 2}}
    missing = ["x: needs instructions of sm_89", "y: needs instructions of sm_89", "z: 3 rows: RuntimeError: ptxas"]
    counted = counts([sound, spilling], missing)
    assert counted == {
        "kernels": 2,
        "spill": [{"kernel": "a", "first_launched_by": "sum: 3 rows", "bytes": 8, "in_loop": True}],
        "not_compiled": {"needs instructions of sm_89": 2, "RuntimeError: ptxas": 1},
    }
    path = tmp_path / "counts.json"
    for version, chip in [("3.7.1", "sm_100"), ("3.6.0", "sm_80"), ("3.7.1", "sm_90"), ("3.7.1", "sm_100")]:
        path.write_text(json.dumps(renewed(str(path), version, {chip: counted})))
    held = json.loads(path.read_text())["triton"]
    assert list(held) == ["3.6.0", "3.7.1"] and list(held["3.7.1"]) == ["sm_90", "sm_100"]
    path.write_text('{"kernels": {}}')
    with pytest.raises(ValueError, match="is no file of counts"):
        renewed(str(path), "3.7.1", {})


def test_inspection_is_refused_in_the_interpreter() -> None:
    done = run("kernel_bench/inspect_kernels.py", "--only", "top_k", TRITON_INTERPRET="1")
    assert done.returncode != 0 and "cannot be compiled under TRITON_INTERPRET=1" in done.stderr
