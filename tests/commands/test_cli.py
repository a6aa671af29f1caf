"""The door of ``dsa-engine``: quick help, functions that exist, scripts that are commands."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import dsa_engine
from dsa_engine import cli
from dsa_engine.commands.arguments import argument_parser, read_text

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


FIRST = """
import sys
class Refuses:
    def find_spec(self, name, *rest):
        if name == "torch":
            raise SystemExit("torch")
sys.meta_path.insert(0, Refuses())
from dsa_engine.cli import main
for words in sys.argv[1:]:
    try:
        main(words.split())
    except SystemExit as error:
        print(error.code, file=sys.stderr)
"""


def test_the_first_line_comes_before_torch() -> None:
    """Importing torch takes seconds, in which nothing was said."""
    slow = ["generate --prompt x", "serve", "chat", "plan", "info demo", "doctor", "bench prefill", "bench ttft"]
    slow += ["convert a b", "make-checkpoint --config demo --out x"]
    done = subprocess.run([sys.executable, "-c", FIRST, *slow], capture_output=True, text=True, timeout=60)
    lines = done.stderr.splitlines()
    assert lines[1::2] == ["torch"] * len(slow) and len(lines) == 2 * len(slow), done.stderr
    assert all(line.endswith(" importing PyTorch") for line in lines[::2]) and done.stdout == ""
    quick = ["cache list /nowhere"]
    done = subprocess.run([sys.executable, "-c", FIRST, *quick], capture_output=True, text=True, timeout=60)
    assert "torch" not in done.stderr.lower(), done.stderr


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What a command prints about itself."""
    with pytest.raises(SystemExit, match="0"):
        cli.main([*words])
    return capsys.readouterr().out


@pytest.mark.parametrize("name", ["generate", "chat", "serve"])
def test_help_has_what_matters_and_help_all_everything(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """It had 280 lines with 50 options."""
    few, all_of_them = shown(capsys, name, "--help"), shown(capsys, name, "--help-all")
    options, more = (set(re.findall(r"^  (--[a-z-]+)", text, re.M)) for text in (few, all_of_them))
    assert 9 <= len(options) <= 15 and len(few.splitlines()) < 100
    assert {"--model", "--device", "--load-format", "--max-model-len", "--tp-size"} <= options < more
    assert few.endswith(f"\n{len(more - options)} more options: dsa-engine {name} --help-all\n")
    parser = argument_parser(None)
    cli.COMMANDS[name].add_arguments(parser)
    assert {word for word in parser._option_string_actions if word[:5] not in ("-h", "--hel", "--no-")} == more
    for title in ("model and weights", "requests", "caches and memory", "parallel (under torchrun)"):
        assert f"\n{title}:\n" in few and f"\n{title}:\n" in all_of_them
    parser.format_help()
    assert parser.format_help().count("--help-all") == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("sreve demo", "there is no command 'sreve'; did you mean serve?; see dsa-engine --help"),
        ("bench prefil", "there is no command 'prefil'; did you mean prefill?; see dsa-engine bench --help"),
        ("zzz", "there is no command 'zzz'; commands are generate, chat, lens, serve, "),
    ],
)
def test_a_wrong_command_is_answered(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(words.split())
    assert capsys.readouterr().err.startswith(f"error: {message}")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"^cannot read the file .*/text: No such file or directory$"),
        (b"", "/text is empty"),
        (b"\x7fELF\x02\x01\x01\0\0", "/text holds zero bytes; give one with a text"),
        (b"caf\xe9 au lait", "/text is no text in UTF-8: invalid continuation byte at byte 3$"),
    ],
)
def test_a_file_that_is_no_text(content: bytes | None, message: str, tmp_path: Path) -> None:
    """Bytes that are no text became replacement characters, and the model went on from them."""
    if content is not None:
        (tmp_path / "text").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_text(str(tmp_path / "text"))
    with pytest.raises(ValueError, match="Is a directory$"):
        read_text(str(tmp_path))


PLAN = "plan --devices 8 --input-len 8192 --weights fp8 --cache fp8 --drafts 0 --chunk 8192 --tp-size 1"


def test_a_result_that_cannot_be_written_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The disk was full at the end, say; the table was not printed, and all measuring was lost."""

    def full(*_: object) -> None:
        raise OSError("cannot write it")

    monkeypatch.setattr("dsa_engine.commands.planner.command.write_json", full)
    with pytest.raises(SystemExit, match="2"):
        cli.main([*PLAN.split(), "--json", str(tmp_path / "a.json")])
    captured = capsys.readouterr()
    assert "concurrent requests" in captured.out and captured.err.endswith("error: cannot write it\n")


def test_names_of_the_package() -> None:
    for name in dsa_engine.__all__:
        assert getattr(dsa_engine, name) is not None and name in dir(dsa_engine)
    assert dsa_engine.options.EngineOptions.__name__ == "EngineOptions"  # modules are attributes too
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = dsa_engine.nothing
