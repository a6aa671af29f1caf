"""The processes of the other ranks, as far as they stand on this machine: which of them live."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Literal

State = Literal["running", "stopped", "left", "ended", "unknown"]  # left: it has said so itself


def name_of(pid: int) -> str:
    """What another rank needs to know about a process of this machine to call :func:`state_of` and :func:`wake`."""
    return f"{machine()} {pid} {_stat(pid)[1]}"


def state_of(process: str) -> State:
    """Whether a process of this machine runs, is stopped (SIGSTOP) or has ended; of another machine, "unknown"."""
    where, pid, started = process.split()
    if where != machine():
        return "unknown"
    try:
        letter, since = _stat(int(pid))
    except OSError:
        return "ended"
    if since != started or letter in "ZX":  # its number has been given to another one, or nobody has asked for its end
        return "ended"
    return "stopped" if letter in "Tt" else "running"


def machine() -> str:
    """This machine until it boots again, and the part of it in which process numbers mean the same (a container)."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")
    except OSError:
        return f"unreadable-{os.getpid()}"


def wake(process: str) -> None:
    """Lets a stopped process of this machine go on."""
    with suppress(OSError):
        os.kill(int(process.split()[1]), signal.SIGCONT)


def kill(process: str) -> None:
    """Ends a process of this machine, whatever it does."""
    if state_of(process) in ("running", "stopped"):
        with suppress(OSError):
            os.kill(int(process.split()[1]), signal.SIGKILL)


def _stat(pid: int) -> tuple[str, str]:
    """State letter and start time of a process; ``OSError`` where there is none."""
    fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()  # a name may hold anything
    return fields[0].decode(), fields[19].decode()
