"""``dsa-engine cache``: what it shows of a folder, and that it deletes nothing but what engines have written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dsa_engine.cli import main
from dsa_engine.engine.cache.folder import PageFolder

KEY, OTHER = "0" * 31 + "a", "0" * 31 + "b"
ABOUT = {"model": "demo", "model_type": "deepseek_v32", "dtype": "float32", "cache_dtype": "fp8", "page_size": 4}


def write(folder: Path, key: str, count: int, about: dict[str, object] | None = None) -> None:
    made = PageFolder(folder, None, key, ABOUT if about is None else about)
    for number in range(count):
        parts = [memoryview(bytearray(100))]
        assert made.write(bytes([number] * 16), parts)
    for path in (folder / key).rglob("*.page"):
        os.utime(path, (1e9, 1e9))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "pages"
    write(folder, KEY, 3)
    write(folder, OTHER, 1)
    return folder


def test_list(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "notes").mkdir()
    main(["cache", "list", str(folder)])
    first, other = capsys.readouterr().out.split(f"{OTHER}:\n")
    lines = first.splitlines()
    assert lines[0] == f"{KEY}:" and set(lines[1:]) >= {
        "  model: demo",
        "  type: deepseek_v32",
        "  dtype: float32",
        "  cache format: fp8",
        "  page size: 4",
        "  pages: 3, 12 tokens, 408 B",
    }
    assert lines[-1].startswith("  last use: 2001-09-") and "pages: 1, 4 tokens, 136 B" in other


@pytest.mark.parametrize("text", [None, "{", "[]", "[3]", "\xff"])
def test_a_broken_about_is_unknown(text: str | None, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    about = folder / KEY / "about.json"
    about.unlink()
    if text is not None:
        about.write_bytes(text.encode("latin-1"))
    main(["cache", "list", str(folder)])
    shown = capsys.readouterr().out
    assert "model: unknown" in shown and "pages: 3, 408 B" in shown and f"{OTHER}:" in shown


FOREIGN = ("README.md", f"{KEY}/a.page", f"{KEY}/00/ab.page", f"{KEY}/00/{'1' * 32}.page", f"{KEY}/x.part", "a/b.page")


def test_clear_deletes_only_what_engines_have_written(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in FOREIGN:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).touch()
    (folder / KEY / "01" / f"{'01' * 16}.{'0' * 16}.part").touch()
    elsewhere = folder.parent / "elsewhere"
    write(elsewhere, KEY, 1)
    (folder / ("c" * 32)).symlink_to(elsewhere / KEY)
    main(["cache", "clear", str(folder), "--key", OTHER])
    assert capsys.readouterr().out == f"{OTHER}: deleted 1 pages, 136 B\n" and not (folder / OTHER).exists()
    main(["cache", "clear", str(folder)])
    says = f"{KEY}: deleted 3 pages, 408 B; the folder stays, as it holds other files\n"
    assert capsys.readouterr().out == says
    assert {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()} == set(FOREIGN)
    assert not (folder / KEY / "01").exists() and len(list(elsewhere.rglob("*.page"))) == 1


def test_clear_leaves_an_empty_folder(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["cache", "clear", str(folder)])
    assert list(folder.iterdir()) == []
    for word in ("list", "clear"):
        capsys.readouterr()
        main(["cache", word, str(folder)])
        assert capsys.readouterr().out == f"{folder} is empty\n"


@pytest.mark.parametrize("word", ["list", "clear"])
def test_wrong_folders(word: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for wrong, says in {
        "nothing": "cannot read the folder {}: No such file or directory",
        "pages/" + KEY: "{} is no folder of pages; give what engines have as cache_folder",
        f"pages/{KEY}/about.json": "cannot read the folder {}: Not a directory",
        "": "{} is no folder of pages; give what engines have as cache_folder",
    }.items():
        with pytest.raises(SystemExit, match="2"):
            main(["cache", word, str(tmp_path / wrong)])
        assert capsys.readouterr().err.splitlines()[-1].endswith(f"error: {says.format(tmp_path / wrong)}")
    assert len(list(folder.rglob("*.page"))) == 4


def test_a_key_that_is_not_there(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for key in ("x", "../pages", "", "."):
        with pytest.raises(SystemExit, match="2"):
            main(["cache", "clear", str(folder), "--key", key])
        assert f"--key '{key}' is not in {folder}; dsa-engine cache list shows" in capsys.readouterr().err
    assert len(list(folder.rglob("*.page"))) == 4


def test_the_list_needs_no_torch(folder: Path) -> None:
    code = f"import sys; from dsa_engine.cli import main; main(['cache', 'list', {str(folder)!r}]); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert KEY in done.stdout and "torch" not in done.stdout.split(), done.stderr


def test_what_engines_say_of_a_key(tmp_path: Path) -> None:
    write(tmp_path, KEY, 1)
    assert json.loads((tmp_path / KEY / "about.json").read_text()) == ABOUT
    assert {path.stat().st_mode & 0o77 for path in tmp_path.rglob("*")} == {0}
