"""The door of ``dsa-engine``: quick help, functions that exist, scripts that are commands."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import dsa_engine
from dsa_engine import cli

HEAVY = ("torch", "transformers", "triton", "numpy", "tqdm", "matplotlib", "dsa_engine.llm", "dsa_engine.model")

HELP = f"""
import contextlib, io, sys
from dsa_engine.cli import COMMANDS, main
for words in (["--help"], ["--version"], *([*name.split(), "--help"] for name in COMMANDS)):
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        main(words)
    assert len(out.getvalue()) > 10, words
    print(*words, [name for name in {HEAVY} if name in sys.modules])
"""


def test_help_imports_no_torch() -> None:
    """It took 2 to 4 s, nearly all of them for importing torch."""
    done = subprocess.run([sys.executable, "-c", HELP], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 2 + len(cli.COMMANDS) and [line for line in lines if not line.endswith(" []")] == []


PLAN = "--weights fp8 --cache fp8 --drafts 0 --chunk 8192 --tp-size 1"


@pytest.mark.parametrize(
    ("words", "module", "table"),
    [
        ("bench serve --num-prompts 1", "bench.serving.command", "output tokens/s"),
        (f"plan --devices 8 --input-len 8192 {PLAN}", "planner.command", "concurrent requests"),
    ],
)
def test_a_result_that_cannot_be_written_is_shown(
    words: str,
    module: str,
    table: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The disk was full at the end, say; the table was not printed, and all measuring was lost."""

    def full(*_: object) -> None:
        raise OSError("cannot write it")

    async def send_load(args: object) -> tuple[SimpleNamespace, dict[str, object]]:
        return SimpleNamespace(requests=[], duration=1.0, max_at_once=1), {}

    monkeypatch.setattr(f"dsa_engine.commands.{module}.write_json", full)
    monkeypatch.setattr("dsa_engine.commands.bench.serving.traffic.send_load", send_load)
    with pytest.raises(SystemExit, match="2"):
        cli.main([*words.split(), "--json", str(tmp_path / "a.json")])
    captured = capsys.readouterr()
    assert table in captured.out and captured.err.endswith("error: cannot write it\n")


def test_names_of_the_package() -> None:
    for name in dsa_engine.__all__:
        assert getattr(dsa_engine, name) is not None and name in dir(dsa_engine)
    assert dsa_engine.options.EngineOptions.__name__ == "EngineOptions"  # modules are attributes too
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = dsa_engine.nothing
