"""``compare_llama_cpp.py`` with stand-ins for its processes, and the engine's process itself."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import compare_llama_cpp
from side_process import SideProcess


class Stub:
    """A process whose engine takes 2 s, and whose llama.cpp takes 6 s, or 3 s in its best setting."""

    logits = [1.0, 2.0]

    def __init__(self, name: str, **options: Any):
        self.name, self.best = name, False

    def __enter__(self) -> Stub:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def call(self, method: str, **arguments: Any) -> dict[str, Any]:
        if method == "configure":
            self.best = arguments["flash"] and arguments["cache"] == "float32" and arguments["rows"] == 512
        seconds = 2.0 if self.name == "dsa_engine" else 3.0 if self.best else 6.0
        answer = {"result": self.logits, "seconds": seconds, "processor_seconds": seconds}
        return answer | {"peak_bytes": 1 << 20, "imported_bytes": 1 << 19}


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    class Output:
        logits = torch.tensor([[[1.0, 2.0]]])

    class Checkpoint:
        name, dtype, vocab_size = "38M float32", "float32", 8
        source = folder = gguf = tmp_path

    monkeypatch.setattr(compare_llama_cpp, "SideProcess", Stub)
    monkeypatch.setattr(compare_llama_cpp, "Checkpoint", lambda *_: Checkpoint())
    monkeypatch.setattr(compare_llama_cpp, "load_transformers", lambda _: lambda *_, **__: Output())
    sizes = "--model 38M --dtype float32 --threads 1 --seq-len 5 --context 6 --batch-context 7 --repeat 1"
    paths = ["--library", "stub.so", "--folder", str(tmp_path / "f"), "--json", str(tmp_path / "report.json")]
    monkeypatch.setattr(sys, "argv", ["compare_llama_cpp.py", *sizes.split(), "--output-len", "4", *paths])
    return tmp_path / "report.json"


def test_ratios_are_of_the_best_setting(report: Path, capsys: pytest.CaptureFixture[str]) -> None:
    compare_llama_cpp.main()
    written = json.loads(report.read_text())
    assert written["logits"] == [["38M float32", 0.0, 0.0]]
    assert [(r["kind"], r["batch"], r["length"]) for r in written["results"]] == [
        ("prefill", 1, 5),
        ("decode", 1, 6),
        ("decode", 8, 7),
    ]
    for result, steps in zip(written["results"], (1, 4, 4), strict=True):
        assert result["setting"] == {"flash": True, "cache": "float32", "rows": 512}
        assert (result["dsa_engine"]["seconds"], result["llama.cpp"]["seconds"]) == (2.0 / steps, 3.0 / steps)
    assert "1.50" in capsys.readouterr().out


def test_other_logits_are_an_error(report: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Stub, "logits", [1.0, float("nan")])
    with pytest.raises(ValueError, match="38M float32: the logits of dsa_engine differ by nan"):
        compare_llama_cpp.main()


def test_the_engine_in_its_process(demo_cache: Path) -> None:
    options = {"model": "demo-random", "dtype": "float32", "threads": 1, "tokens": 512, "requests": 2}
    with SideProcess("dsa_engine", **options) as side:
        prefill = side.call("prefill", prompt=[1, 2, 3])
        assert len(prefill["result"]) > 3 and prefill["peak_bytes"] > prefill["imported_bytes"] > 0
        side.call("start", prompts=[[1, 2, 3], [4, 5, 6]])
        assert side.call("decode", steps=3)["seconds"] > 0
        with pytest.raises(ValueError, match="dsa_engine: .*token"):
            side.call("prefill", prompt=[-1])


def test_a_library_that_is_none(tmp_path: Path) -> None:
    library = tmp_path / "none.so"
    with (
        SideProcess("llama.cpp", library=str(library), gguf="x", threads=1, vocab_size=8) as side,
        pytest.raises(ValueError, match="llama.cpp: .*none.so"),
    ):
        side.call("start", prompts=[[1]])
