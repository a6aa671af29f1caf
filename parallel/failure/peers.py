"""The processes of the other ranks of this machine, and their states."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Literal

State = Literal["running", "stopped", "left", "ended", "unknown"]  # left: its program has come to its end


def name_of(pid: int) -> str:
    """A text by which another rank can call :func:`state_of`, :func:`wake` and :func:`kill` for a process."""
    return f"{machine()} {pid} {_stat(pid)[1]}"


def state_of(process: str) -> State:
    """Whether a process runs, is stopped (SIGSTOP) or has ended; "unknown" for one of another machine."""
    where, pid, started = process.split()
    if where != machine():
        return "unknown"
    try:
        letter, since = _stat(int(pid))
    except OSError:
        return "ended"
    if since != started or letter in "ZX":  # its number belongs to another process now, or it is a zombie
        return "ended"
    return "stopped" if letter in "Tt" else "running"


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


def _stat(pid: int) -> tuple[str, str]:
    """State letter and start time of a process; ``OSError`` if there is none."""
    fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()  # a name may hold anything
    return fields[0].decode(), fields[19].decode()
