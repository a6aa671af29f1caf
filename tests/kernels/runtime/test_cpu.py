"""The CPU's kernels are compiled once, by one of the processes that need them, into a folder that only this user can
write; without them the references run."""

from __future__ import annotations

import ctypes
import logging
import os
import re
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from dsa_engine.kernels.runtime import cpu, launch, native_library
from dsa_engine.kernels.runtime.launch import INTERPRETED

NO_COMPILER = pytest.mark.skipif(not any(map(shutil.which, ("g++", "c++", "clang++"))), reason="no C++ compiler")


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A library of one function, which is compiled in half a second, and its own cache."""
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "one.cpp").write_text('extern "C" long one() { return 1; }\n')
    monkeypatch.setattr(cpu, "_SOURCES", folder)
    monkeypatch.setattr(cpu, "_FUNCTIONS", {"one": ([], ctypes.c_int64)})
    monkeypatch.setenv("DSA_ENGINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("DSA_ENGINE_NATIVE", raising=False)
    monkeypatch.setattr(cpu, "library", cpu.library.__wrapped__)
    yield folder


def built(tmp_path: Path) -> list[str]:
    (folder,) = (tmp_path / "cache").iterdir()
    return sorted(path.suffix for path in folder.iterdir())


@NO_COMPILER
def test_compiled_once_by_one_of_many(sources: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO), ThreadPoolExecutor(4) as pool:
        libraries = [*pool.map(lambda _: cpu.library(), range(4))]
    assert [library and library.one() for library in libraries] == [1] * 4
    assert caplog.text.count("compiling the CPU kernels") == 1
    assert built(tmp_path) == [".lock", ".so"]


@NO_COMPILER
def test_other_sources_are_another_library(sources: Path, tmp_path: Path) -> None:
    first = cpu.library()
    (sources / "one.cpp").write_text('extern "C" long one() { return 2; }\n')
    second = cpu.library()
    assert first is not None and second is not None and (first.one(), second.one()) == (1, 2)
    assert built(tmp_path) == [".lock", ".lock", ".so", ".so"]


@NO_COMPILER
@pytest.mark.skipif("avx512_vnni" not in native_library._processor(), reason="runs instructions of such a processor")
@pytest.mark.parametrize("masked", ["", "-mno-avx512vnni", "-mno-avx512vnni -mavxvnni", "-mno-avx512f"])
def test_sums_of_int8_on_processors_that_lack_instructions(
    masked: str, sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is added to the codes of the weight is taken off again, whichever instructions there are."""
    header = Path(native_library.__file__).parents[1] / "cpu" / "products.h"
    (sources / "one.cpp").write_text(
        f"""#include "{header}"
        extern "C" long one() {{
            const Ints sums = Int8::add(Ints{{}}, Int8::Bytes{{}} - (int8_t)3, Int8::Bytes{{}} + (int8_t)5);
            return sums[0] - 4 * 5 * Int8::OFFSET;
        }}"""
    )
    monkeypatch.setenv("CXX", f"g++ {masked}")
    library = cpu.library()
    assert library is not None and library.one() == 4 * -3 * 5


@pytest.mark.parametrize(
    "fault", ["does not compile", "lacks a function", "no compiler", "no folder", "odd $CXX", "others write", "damaged"]
)
def test_without_a_library_the_references_run(
    fault: str, sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    reason = "not used"
    if fault == "does not compile":
        (sources / "one.cpp").write_text("no program\n")
        reason = "they do not compile: "
    elif fault == "lacks a function":
        (sources / "one.cpp").write_text('extern "C" long two() { return 2; }\n')
        reason = "undefined symbol: one"
    elif fault == "no compiler":
        monkeypatch.setenv("PATH", str(tmp_path))
        monkeypatch.delenv("CXX", raising=False)
        reason = "there is no C.. compiler; install g.., or set CXX"
    elif fault == "odd $CXX":
        monkeypatch.setenv("CXX", "g++ 'half")
        reason = "No closing quotation"
    elif fault == "others write":
        assert cpu.library() is not None
        (folder,) = (tmp_path / "cache").iterdir()
        folder.chmod(0o777)
        reason = f"other users may write to {folder}, .* DSA_ENGINE_CACHE"
    elif fault == "damaged":
        folder = tmp_path / "cache" / f"native-{os.geteuid()}"
        folder.mkdir(parents=True)
        (folder / f"kernels-{native_library.digest(sources)}.so").write_text("half of a library")
        reason = f"{folder}.*file too short"
    else:
        (tmp_path / "cache").write_text("a file")
        reason = "Not a directory"
    if fault not in ("no compiler", "no folder", "damaged") and not shutil.which("g++"):
        pytest.skip("no C++ compiler")
    assert cpu.library() is None and not cpu.serves(torch.empty(0))
    assert "the CPU kernels are NOT used" in caplog.text and re.search(reason, caplog.text)
    if (tmp_path / "cache").is_dir() and fault == "does not compile":
        assert built(tmp_path) == [".lock"], "nothing half-written"


@NO_COMPILER
@pytest.mark.skipif(INTERPRETED, reason="Triton's interpreter takes CPU tensors")
def test_what_is_served() -> None:
    if cpu.library() is None:
        pytest.skip("no kernels of the CPU's own: the user's cache folder cannot be written")
    x = torch.empty(2)
    assert cpu.serves(x)
    assert all(cpu.serves(x.to(dtype)) for dtype in (torch.bfloat16, torch.float16))
    assert not cpu.serves(x.double()) and not cpu.serves(x.int()) and not cpu.serves(x.to("meta"))
    assert not cpu.serves(x, x.bfloat16()) and not cpu.serves(x, torch.empty(2, requires_grad=True))
    assert not cpu.serves(x.requires_grad_())
    with torch.inference_mode():
        assert cpu.serves(torch.empty(2))
    with launch.references():
        assert not cpu.serves(torch.empty(2))
    with launch.compiling_for(90):
        assert not cpu.serves(torch.empty(2))
