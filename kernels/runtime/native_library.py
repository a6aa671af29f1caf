"""Compiles C++ sources into a shared library of a cache folder, once, and loads it from there.

A library that is loaded is run, so only this user and root may have been able to write it: the file, its folder and the
folder above belong to one of them, and no other user may write there. A digest at the end of the file shows that it was
written whole.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import logging
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

logger = logging.getLogger(__name__)

_FLAGS = ("-std=c++17", "-O3", "-march=native", "-ffp-contract=fast", "-fPIC", "-pthread")
_COMPILER_SECONDS = 300
_TRAILER = 16  # bytes of the digest after the library; the loader reads what the library's own header names
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


class NoCompiler(RuntimeError):
    """There is no C++ compiler."""


class OthersWrite(RuntimeError):
    """Another user could have written the library, or its folder."""


def load(sources: Path, *folders: Path) -> ctypes.CDLL:
    """Loads the library of ``sources`` from the first of the folders that has it. If none has, one process compiles it,
    into the first folder that only this user or root can write, and others wait.

    Without a compiler, a library serves that another compiler made of the same sources for the same kind of processor.

    Raises:
        NoCompiler: there is no compiler and no library.
        OthersWrite: other users may write to the only folders that this one can write, or to the library.
        RuntimeError: the sources do not compile.
        OSError: no folder can be made or written.
    """
    about = _source_digest(sources)
    problems: list[OSError | RuntimeError] = []
    try:
        name = f"kernels-{about}-{_compiler_digest()}.so"
    except NoCompiler as none:
        problems.append(none)
        name = f"kernels-{about}-*.so"
    for folder in folders:
        for library in sorted(folder.glob(name)):
            with suppress(OSError):  # it is damaged
                try:
                    _check_folder(folder)
                    return _load(library)
                except OthersWrite as problem:
                    problems.insert(0, problem)
    if any(isinstance(problem, NoCompiler) for problem in problems):
        raise problems[0]
    for folder in folders:
        try:
            made = _make(sources, folder / name, folder / f"kernels-{about}.lock")
        except OSError as error:
            problems.append(OSError(f"{error}; name a folder that can be written in DSA_ENGINE_CACHE"))
        except OthersWrite as problem:
            problems.append(problem)
        else:
            for text in dict.fromkeys(map(str, problems)):
                logger.info("the CPU kernels are in %s: %s", folder, text)
            return made
    raise problems[0]


def _make(sources: Path, library: Path, lock: Path) -> ctypes.CDLL:
    folder = library.parent
    folder.mkdir(mode=0o755, parents=True, exist_ok=True)
    _check_folder(folder)
    with _locked(lock):
        with suppress(OSError):  # another process has made it since
            return _load(library)
        _compile(sources, library)
        return _load(library)


def digest(sources: Path) -> str:
    """Names the machine code that :func:`load` gives here, as far as the compiler is known."""
    with suppress(NoCompiler):
        return f"{_source_digest(sources)}-{_compiler_digest()}"
    return _source_digest(sources)


def _source_digest(sources: Path) -> str:
    """Names the sources, the flags and the kind of processor."""
    about = hashlib.blake2b(repr((_FLAGS, platform.machine(), _processor())).encode(), digest_size=10)
    for source in sorted(sources.iterdir()):
        about.update(source.read_bytes())
    return about.hexdigest()


def _compiler_digest() -> str:
    command = _compiler()
    version = subprocess.run([*command, "--version"], capture_output=True, timeout=_COMPILER_SECONDS, check=True)
    return hashlib.blake2b(repr(command).encode() + version.stdout, digest_size=4).hexdigest()


def _check_folder(folder: Path) -> None:
    """Raises OthersWrite if another user could put a library into ``folder``, or replace the folder."""
    for path in (folder, folder.parent, folder.resolve().parent):
        _check_owner(path, os.stat(path))


def _check_owner(path: Path, status: os.stat_result) -> None:
    if status.st_uid not in (os.geteuid(), 0):
        raise OthersWrite(
            f"{path} belongs to another user ({status.st_uid}), and what lies there is run; name another folder in "
            "DSA_ENGINE_CACHE"
        )
    sticky = stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX  # others cannot replace what is not theirs
    if status.st_mode & _OTHERS_WRITE and not sticky:
        raise OthersWrite(
            f"other users may write to {path}, and what lies there is run; chmod go-w it, or name another folder in "
            "DSA_ENGINE_CACHE"
        )


def _load(path: Path) -> ctypes.CDLL:
    """Loads the library after its check; no other user can replace it in between.

    Raises:
        OthersWrite: another user may have written it.
        OSError: there is no such file, or it is damaged.
    """
    file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    with open(file, "rb") as opened:
        _check_owner(path, os.fstat(file))
        content = opened.read()
        if _digest_of(content[:-_TRAILER]) != content[-_TRAILER:]:
            raise OSError(f"{path} is damaged")
    return ctypes.CDLL(str(path))


def _digest_of(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=_TRAILER).digest()


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds the lock of a file, which another process waits for; the lock ends with the process at the latest."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        os.close(file)


def _compile(sources: Path, library: Path) -> None:
    """Writes the library whole or not at all. Needs the lock: it removes folders of compilations that were killed."""
    for stale in library.parent.glob(f"{library.stem}.unfinished-*"):
        shutil.rmtree(stale, ignore_errors=True)
    logger.info("compiling the CPU kernels, once for this machine: some seconds")
    files = sorted(sources.glob("*.cpp"))
    with (
        tempfile.TemporaryDirectory(prefix=f"{library.stem}.unfinished-", dir=library.parent) as folder,
        ThreadPoolExecutor(os.cpu_count()) as pool,
    ):
        objects = [os.path.join(folder, f"{source.stem}.o") for source in files]
        [*pool.map(lambda source, into: _run("-c", "-o", into, str(source)), files, objects)]
        linked, whole = Path(folder, "linked"), Path(folder, "whole")
        _run("-shared", "-o", str(linked), *objects)
        content = linked.read_bytes()
        with open(whole, "wb") as out:
            out.write(content + _digest_of(content))
            out.flush()
            os.fsync(out.fileno())
        whole.chmod(0o755)
        whole.replace(library)


def _run(*arguments: str) -> None:
    """Runs the compiler; raises RuntimeError with its first error where it has one."""
    done = subprocess.run(
        [*_compiler(), *_FLAGS, *arguments],
        capture_output=True, text=True, errors="replace", timeout=_COMPILER_SECONDS,
    )  # fmt: skip
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines() or [""]
        raise RuntimeError(f"they do not compile: {lines[0]:.300}")


def _compiler() -> list[str]:
    """The command of ``$CXX``, else g++, c++ or clang++; the first that there is."""
    for name in (os.environ.get("CXX", ""), "g++", "c++", "clang++"):
        words = shlex.split(name)
        if words and (command := shutil.which(words[0])):
            return [command, *words[1:]]
    raise NoCompiler("there is no C++ compiler; install g++, or set CXX")


def _processor() -> str:
    """The kind of processor, as far as Linux tells: what ``-march=native`` compiles for."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    named = ("flags", "Features", "model", "CPU part", "vendor_id")
    return "\n".join(sorted({line for line in lines if line.split("\t")[0].strip() in named}))
