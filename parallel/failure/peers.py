"""The processes of the other ranks of this machine, and their states."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Literal

from dsa_engine.parallel.launch_environment import local_ranks

State = Literal["running", "stopped", "left", "ended", "unknown"]  # left: its program has come to its end


def name_of(pid: int) -> str:
    """A text by which another rank can call :func:`state_of`, :func:`wake` and :func:`kill` for a process."""
    return f"{machine()} {pid} {_fields(pid)[2]}"


def state_of(process: str) -> State:
    """Whether a process runs, is stopped (SIGSTOP) or has ended; "unknown" for one of another machine."""
    where, pid, started = process.split()
    if where != machine():
        return "unknown"
    try:
        letter, _, since = _fields(int(pid))
    except OSError:
        return "ended"
    if since != started or letter in "ZX":  # its number belongs to another process now, or it is a zombie
        return "ended"
    return "stopped" if letter == "T" else "running"  # "t": a debugger holds it


def launched(rank: int) -> str | None:
    """The process of a rank that torchrun has started on this machine, as :func:`name_of` gives it, even if the rank
    has registered nowhere; with process number 0, which has always ended, if the process has gone. None: not known.
    """
    if rank not in local_ranks():
        return None
    try:
        launcher, everything_named = _launcher(), True
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                letter, parent, since = _fields(int(folder.name))
                if parent != launcher or letter in "ZX":
                    continue
                named = _variable(folder, b"RANK")
                if named == b"%d" % rank:
                    return f"{machine()} {folder.name} {since}"
                everything_named = everything_named and named is not None
    except OSError:
        return None
    return f"{machine()} 0 0" if everything_named else None


def _launcher() -> int:
    """The nearest ancestor of this process that is no rank: torchrun. There may be a shell script between them."""
    pid = os.getpid()
    while True:
        pid = _fields(pid)[1]
        if pid == 0 or _variable(Path(f"/proc/{pid}"), b"RANK") is None:
            return pid


def _variable(process: Path, name: bytes) -> bytes | None:
    """A variable of the environment with which a process was started."""
    for line in (process / "environ").read_bytes().split(b"\0"):
        if line.startswith(name + b"="):
            return line[len(name) + 1 :]
    return None


def machine() -> str:
    """A name of this machine until it boots again, and of the namespace of its process numbers (a container)."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")
    except OSError:
        return f"unreadable-{os.getpid()}"


def wake(process: str) -> None:
    """Continues a stopped process of this machine."""
    with suppress(OSError):
        os.kill(int(process.split()[1]), signal.SIGCONT)


def kill(process: str) -> None:
    """Kills a process of this machine."""
    if state_of(process) in ("running", "stopped"):
        with suppress(OSError):
            os.kill(int(process.split()[1]), signal.SIGKILL)


def _fields(pid: int) -> tuple[str, int, str]:
    """State letter, parent and start time of a process; ``OSError`` if there is none."""
    fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()  # a name may hold anything
    return fields[0].decode(), int(fields[1]), fields[19].decode()
