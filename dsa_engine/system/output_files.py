"""Result files: each appears whole or not at all, and "-" is standard output."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

_stdout: TextIO | None = None  # the real standard output, while it is reserved for a result


@contextmanager
def whole_file(path: str | Path) -> Iterator[Path]:
    """Yields a temporary path to write to; at the end of the block that file replaces ``path``.

    After an error or an interrupt the temporary file is removed and ``path`` is unchanged; the text of an ``OSError``
    names ``path``. A device or a pipe is written directly.
    """
    target = Path(os.path.realpath(path))  # a link stays and its target is replaced
    special = target.exists() and not target.is_file()
    # The temporary name is short, as the name itself may be as long as names can be.
    written = target if special else target.with_name(f"{target.stem[:40]}.{os.getpid()}.partial{target.suffix}")
    try:
        yield written
        if not special:
            written.replace(target)
    except OSError as error:
        raise OSError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        if not special:
            written.unlink(missing_ok=True)


def write_text(path: str | Path, text: str) -> None:
    """Writes a text to a file, or to standard output if ``path`` is "-"; errors as :func:`whole_file`."""
    if str(path) == "-":
        print(text, end="", file=_stdout or sys.stdout, flush=True)
        return
    with whole_file(path) as file:
        file.write_text(text, encoding="utf-8")


def check_outputs(*paths: str | Path | None) -> None:
    """Raises ``ValueError``, before anything is measured, if no file can be made beside an output path. None and "-"
    (standard output) are not checked."""
    for path in paths:
        if path is None or str(path) == "-":
            continue
        target = Path(os.path.realpath(path))
        try:
            if target.is_dir():
                raise ValueError(f"cannot write {path}: it is a folder; give the name of a file")
            with tempfile.TemporaryFile(dir=target.parent):
                pass
        except OSError as error:
            raise ValueError(f"cannot write {path}: {error.strerror or error}") from error


def keep_stdout() -> None:
    """Reserves standard output for the result; other prints go to stderr from now on."""
    global _stdout
    if _stdout is None:
        _stdout, sys.stdout = sys.stdout, sys.stderr


def restore_stdout() -> None:
    """Ends :func:`keep_stdout`."""
    global _stdout
    if _stdout is not None:
        _stdout, sys.stdout = None, _stdout


def drop_stdout() -> None:
    """Discards what is still buffered for a pipe that its reader has closed; Python would report it at exit."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, (_stdout or sys.stdout).fileno())
    os.close(null)
