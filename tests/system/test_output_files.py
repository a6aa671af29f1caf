"""Result files: whole or not at all, on a full disk too; standard output; a reader that has gone."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from dsa_engine.commands import arguments
from dsa_engine.measure.report import write_json
from dsa_engine.measure.stage_timer import chrome_trace
from dsa_engine.system.output_files import check_outputs, whole_file

RESULT = {"numbers": list(range(2000))}


@pytest.fixture
def no_room() -> Iterator[None]:
    """No file may grow beyond 4 KiB: writing more fails as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


def write_trace(path: Path) -> None:
    with chrome_trace(path):
        for _ in range(20):
            torch.ones(3).add(1)


WRITERS = {"out.json": lambda path: write_json(path, RESULT), "out.trace": write_trace}


@pytest.mark.parametrize("name", WRITERS)
def test_a_full_disk_leaves_what_was_there(name: str, tmp_path: Path, no_room: None) -> None:
    path = tmp_path / name
    for before in (None, b"the old one"):
        if before:
            path.write_bytes(before)
        with pytest.raises(OSError, match=f"^cannot write .*{name}: "):
            WRITERS[name](path)
        assert (path.read_bytes() if path.exists() else None) == before
        assert [p.name for p in tmp_path.iterdir()] == ([name] if before else [])


@pytest.mark.parametrize("name", WRITERS)
def test_a_file_replaces_the_old_one(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(b"the old one")
    WRITERS[name](path)
    assert len(path.read_bytes()) > 1000 and [p.name for p in tmp_path.iterdir()] == [name]


def test_an_interrupt_leaves_nothing_and_links_and_devices_stay(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), whole_file(tmp_path / "a") as path:
        path.write_text("half")
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "link").symlink_to("real")
    write_json(tmp_path / "link", {"a": 1})
    assert (tmp_path / "link").is_symlink() and json.loads((tmp_path / "real").read_text()) == {"a": 1}
    write_json(os.devnull, RESULT)
    assert not Path(os.devnull).is_file()
    with pytest.raises(OSError, match="^cannot write /dev/full: No space left on device$"):
        write_json("/dev/full", RESULT)


def test_what_cannot_be_written_is_said_first(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"the old one")
    (tmp_path / "folder").mkdir()
    before = sorted(tmp_path.iterdir())
    for path in (tmp_path / "folder", tmp_path / "missing" / "a", tmp_path / "file" / "a", Path("/proc/a")):
        with pytest.raises(ValueError, match=f"^cannot write {re.escape(str(path))}: "):
            check_outputs(None, "-", path)
    long = tmp_path / f"{'x' * 250}.json"
    check_outputs(tmp_path / "file", tmp_path / "new", long, os.devnull)
    assert sorted(tmp_path.iterdir()) == before and (tmp_path / "file").read_bytes() == b"the old one"
    write_json(long, {})  # its temporary file has a shorter name


def test_json_on_standard_output_is_alone_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = arguments.argument_parser("A script.")
    parser.add_argument("--json")

    def main() -> None:
        args = parser.parse_args(["--json", "-"])
        check_outputs(args.json)
        print("a table")
        write_json(args.json, {"a": 1})

    stdout = sys.stdout
    arguments.run(main)
    captured = capsys.readouterr()
    assert json.loads(captured.out) == {"a": 1} and captured.err == "a table\n" and sys.stdout is stdout


def test_a_closed_pipe_ends_a_command_quietly() -> None:
    """``dsa-engine generate --help | true``, say: more text than a pipe holds, and no reader."""
    code = "from dsa_engine.commands.arguments import run; run(lambda: [print('line ' * 20) for _ in range(9999)])"
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline().startswith("line")
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(timeout=60) == 141
