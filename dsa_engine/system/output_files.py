"""Result files: each appears complete or not at all, and "-" is standard output."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from dsa_engine.parallel.failure.reporter import before_end

_unfinished: set[Path] = set()  # files that are being written
_stdout: TextIO | None = None  # the real standard output, while it is reserved for a result


@contextmanager
def whole_file(path: str | Path) -> Iterator[Path]:
    """Yields a temporary path to write to; at the end of the block that file replaces ``path``.

    After an error or an interrupt the temporary file is removed and ``path`` is unchanged. A device or a pipe is
    written directly.

    Raises:
        OSError: writing failed, for instance on a full disk; the text names ``path``.
    """
    target = Path(os.path.realpath(path))  # a link stays and its target is replaced
    special = target.exists() and not target.is_file()
    written = target if special else target.with_name(f"{target.stem}.{os.getpid()}.partial{target.suffix}")
    try:
        if not special:
            _unfinished.add(written)
        yield written
        if not special:
            with written.open("rb+") as file:
                os.fsync(file.fileno())  # some file systems report a full disk only now
            written.replace(target)
    except OSError as error:
        raise OSError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        if not special:
            with suppress(OSError):
                written.unlink(missing_ok=True)
            _unfinished.discard(written)


@before_end
def _remove_unfinished() -> None:
    """Removes files that are being written when another rank's failure ends this process."""
    for path in tuple(_unfinished):
        with suppress(OSError):
            path.unlink(missing_ok=True)


def write_text(path: str | Path, text: str) -> None:
    """Writes a text to a file, or to standard output if ``path`` is "-"; errors as :func:`whole_file`."""
    if str(path) == "-":
        stream = _stdout or sys.stdout
        stream.write(text)
        stream.flush()
        return
    with whole_file(path) as file:
        file.write_text(text, encoding="utf-8")


def check_outputs(*paths: str | None) -> None:
    """Checks output paths before anything is measured.

    Raises:
        ValueError: a path is a folder, or its folder does not exist.
    """
    for path in paths:
        if path is None or path == "-":
            continue
        if not Path(path).absolute().parent.is_dir():
            raise ValueError(f"cannot write {path}: there is no folder {Path(path).absolute().parent}")
        if Path(path).is_dir():
            raise ValueError(f"cannot write {path}: it is a folder; give the name of a file")


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


class UntilClosed:
    """Standard output of a rank: after its reader has closed it (``| head``), the run continues without printing."""

    def __init__(self, stream: TextIO):
        self._stream = stream
        self._open = True

    def write(self, text: str) -> int:
        self._guarded(self._stream.write, text)
        return len(text)

    def flush(self) -> None:
        self._guarded(self._stream.flush)

    def _guarded(self, call: Any, *args: Any) -> None:
        if self._open:
            try:
                call(*args)
            except BrokenPipeError:
                self._open = False
                drop_stdout(self._stream)

    def __getattr__(self, name: str) -> Any:  # encoding, fileno, isatty, …
        return getattr(self._stream, name)


def drop_stdout(stream: TextIO | None = None) -> None:
    """Discards what is still buffered for a closed pipe; Python would report it at exit."""
    with suppress(Exception):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, (stream or sys.stdout).fileno())
        os.close(null)
