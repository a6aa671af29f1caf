"""Compiles C++ sources into a shared library of a cache folder, once, and loads it from there.

What is loaded is run, so the folder belongs to this user, and no other may write there. PyTorch's own way
(``torch.utils.cpp_extension.load``) asks ninja and imports setuptools at every start, 0.2 s instead of 0.01 s, keeps
one library for all processors that share a home folder, and waits for ever for a process that was killed.
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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

logger = logging.getLogger(__name__)

_FLAGS = ("-std=c++17", "-O3", "-march=native", "-ffp-contract=fast", "-fPIC", "-pthread")


def load(sources: Path, folder: Path) -> ctypes.CDLL:
    """Loads the library of ``sources`` from the folder. If it has none, one process compiles it, and others wait.

    Raises:
        RuntimeError: there is no compiler, or the sources do not compile.
        OSError: the folder cannot be made or written, or others could write there.
    """
    library = folder / f"kernels-{digest(sources)}.so"
    folder.mkdir(mode=0o755, parents=True, exist_ok=True)
    status = folder.stat()
    if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise OSError(
            f"other users may write to {folder}, and what lies there is run; set DSA_ENGINE_CACHE to a folder"
        )
    if not library.exists():
        with open(library.with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # until the file is closed, or the process ends
            if not library.exists():
                _compile(sources, library)
    return ctypes.CDLL(str(library))


def digest(sources: Path) -> str:
    """Names the sources, the flags and the kind of processor."""
    about = hashlib.blake2b(repr((_FLAGS, platform.machine(), _processor())).encode(), digest_size=10)
    for source in sorted(sources.iterdir()):
        about.update(source.read_bytes())
    return about.hexdigest()


def compiler() -> list[str]:
    """The command of ``$CXX``, else g++, c++ or clang++: the first that there is.

    Raises:
        RuntimeError: there is none.
    """
    for name in (os.environ.get("CXX", ""), "g++", "c++", "clang++"):
        words = shlex.split(name)
        if words and (command := shutil.which(words[0])):
            return [command, *words[1:]]
    raise RuntimeError("there is no C++ compiler; install g++, or set CXX")


def _compile(sources: Path, library: Path) -> None:
    """Writes the library whole or not at all."""
    command = [*compiler(), *_FLAGS]
    logger.info("compiling the CPU kernels, once for this machine: some seconds")
    with tempfile.TemporaryDirectory(dir=library.parent) as folder, ThreadPoolExecutor(os.cpu_count()) as pool:

        def run(*arguments: str) -> None:
            done = subprocess.run([*command, *arguments], capture_output=True, text=True, errors="replace")
            if done.returncode != 0:
                lines = [line for line in done.stderr.splitlines() if "error" in line] or [done.stderr]
                raise RuntimeError(f"they do not compile: {lines[0]:.300}")

        files = sorted(sources.glob("*.cpp"))
        objects = [os.path.join(folder, f"{source.stem}.o") for source in files]
        [*pool.map(lambda source, into: run("-c", "-o", into, str(source)), files, objects)]
        linked = Path(folder, library.name)
        run("-shared", "-o", str(linked), *objects)
        linked.replace(library)


def _processor() -> str:
    """The kind of processor, if Linux tells it: what ``-march=native`` compiles for."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    named = ("flags", "Features", "model", "CPU part", "vendor_id")
    return "\n".join(sorted({line for line in lines if line.split("\t")[0].strip() in named}))
