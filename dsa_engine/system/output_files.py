"""Files that results are written to: each appears whole or not at all, and "-" is standard output."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from dsa_engine.parallel.failure.reporter import before_end

_unfinished: set[Path] = set()  # files that are being written
_stdout: TextIO | None = None  # the real one, while it is kept for a result


@contextmanager
def whole_file(path: str | Path) -> Iterator[Path]:
    """Gives a name to write a file to; at the end of the block it takes its place at ``path``.

    After an error or an interrupt nothing of it is left, and what was at ``path`` is as it was. A device or a pipe is
    written to as it is.

    Raises:
        OSError: it cannot be written (a full disk, say); the text names ``path``.
    """
    target = Path(os.path.realpath(path))  # a link stays, what it points to is replaced
    special = target.exists() and not target.is_file()
    written = target if special else target.with_name(f"{target.stem}.{os.getpid()}.partial{target.suffix}")
    try:
        if not special:
            _unfinished.add(written)
        yield written
        if not special:
            with written.open("rb+") as file:
                os.fsync(file.fileno())  # some file systems say only now that there is no room
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
    """Where another rank's failure ends this process in the middle of a file."""
    for path in tuple(_unfinished):
        with suppress(OSError):
            path.unlink(missing_ok=True)


def write_text(path: str | Path, text: str) -> None:
    """Writes a text to a file, or to standard output where ``path`` is "-"; errors as :func:`whole_file`."""
    if str(path) == "-":
        stream = _stdout or sys.stdout
        stream.write(text)
        stream.flush()
        return
    with whole_file(path) as file:
        file.write_text(text, encoding="utf-8")


def check_outputs(*paths: str | None) -> None:
    """Says before anything is measured, not after, that an output path is a folder or has none.

    Raises:
        ValueError: what is wrong.
    """
    for path in paths:
        if path is None or path == "-":
            continue
        if not Path(path).absolute().parent.is_dir():
            raise ValueError(f"cannot write {path}: there is no folder {Path(path).absolute().parent}")
        if Path(path).is_dir():
            raise ValueError(f"cannot write {path}: it is a folder; give the name of a file")


def keep_stdout() -> None:
    """From here on standard output is for the result alone; whatever else is printed goes to stderr."""
    global _stdout
    if _stdout is None:
        _stdout, sys.stdout = sys.stdout, sys.stderr


def restore_stdout() -> None:
    """The end of :func:`keep_stdout`."""
    global _stdout
    if _stdout is not None:
        _stdout, sys.stdout = None, _stdout


class UntilClosed:
    """Standard output of a rank: where its reader has gone (``| head``), the run goes on and says nothing more."""

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
    """Lets what is still buffered for a closed pipe go nowhere, or Python complains when it ends."""
    with suppress(Exception):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, (stream or sys.stdout).fileno())
        os.close(null)
