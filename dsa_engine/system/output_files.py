"""Result files: each appears complete or not at all, and "-" is standard output."""

from __future__ import annotations

import errno
import os
import stat
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from dsa_engine.parallel.failure import before_end

_PROBE_BYTES = 64 << 10  # a result has a few KiB to a few MiB
_STEM = 40  # characters of a file's name that its temporary file has too
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
    special = _is_special(target)
    partial = f"{target.stem[:_STEM]}.{os.getpid()}.partial{target.suffix}"  # not too long where the name itself is not
    written = target if special else target.with_name(partial)
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


def _is_special(target: Path) -> bool:
    """Whether it is a device or a pipe."""
    return target.exists() and not target.is_file()


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


def check_outputs(*paths: str | Path | None) -> None:
    """Writes beside every output path, before anything is measured, and removes what it has written.

    A file that is there stays as it is. None and "-" (standard output) are not checked.

    Raises:
        ValueError: a path cannot be written, or is given for two results.
    """
    targets: set[str] = set()
    for path in paths:
        if path is None or str(path) == "-":
            continue
        try:
            _check_output(path)
        except OSError as error:
            raise ValueError(f"cannot write {path}: {error.strerror or error}") from error
        target = os.path.realpath(path)
        if target in targets:
            raise ValueError(f"cannot write two results to {path}; give a name for each")
        if not _is_special(Path(target)):  # /dev/null takes any number
            targets.add(target)


def _check_output(path: str | Path) -> None:
    target = Path(os.path.realpath(path))  # a link's target
    try:
        mode = target.stat().st_mode
    except FileNotFoundError:
        mode = 0
    except NotADirectoryError:
        above = next(above for above in target.parents if above.exists())
        raise ValueError(f"cannot write {path}: {above} is a file, not a folder") from None
    if stat.S_ISDIR(mode):
        raise ValueError(f"cannot write {path}: it is a folder; give the name of a file")
    if stat.S_ISSOCK(mode):
        raise ValueError(f"cannot write {path}: it is a socket; give the name of a file")
    if mode and not os.access(target, os.W_OK):
        raise PermissionError(errno.EACCES, "it is there and may not be written; give another name")
    if mode and not stat.S_ISREG(mode):
        _check_device(target, mode)
        return
    if not target.parent.is_dir():
        link = f", to which the link {path} points" if Path(path).is_symlink() else ""
        raise ValueError(f"cannot write {path}: there is no folder {target.parent}{link}")
    with tempfile.TemporaryFile(dir=target.parent) as file:
        file.write(bytes(_PROBE_BYTES))
        file.flush()
        os.fsync(file.fileno())  # some file systems report a full disk only now


def _check_device(target: Path, mode: int) -> None:
    """Writes a line break to a character device (/dev/full refuses it), unless it is a terminal."""
    if stat.S_ISCHR(mode):
        with target.open("wb", buffering=0) as device:
            if not device.isatty():
                device.write(b"\n")


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
