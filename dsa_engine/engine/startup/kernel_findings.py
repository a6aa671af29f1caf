"""Results of kernel comparisons, in a file of the cache folder for all processes with the same device and versions.

Before a process runs a kernel for the first time, it writes the kernel's name there as its mark. If a process ends and
its mark remains, the kernel may have ended it: the kernel is suspected, and counts as wrong when that has happened
twice. A process that ends because another rank has failed removes its mark.
"""

from __future__ import annotations

import fcntl
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from dsa_engine.parallel.failure.peers import machine, name_of, state_of
from dsa_engine.parallel.failure.reporter import before_end, blameless
from dsa_engine.system.output_files import write_text

_LOCK_S = 2.0  # longest wait for another process that writes
_ELSEWHERE_S = 300.0  # age at which the process of a mark, on another machine or in another container, has ended


@dataclass
class Content:
    """Content of the file.

    Attributes:
        finished: whether some process has compared everything, and there are no suspects.
        wrong: operations that run their reference, and the reasons.
        suspects: by kernel, number of runs that ended at it without an error.
        marks: by process that compares, the kernel that it runs, and since when.
    """

    finished: bool = False
    wrong: dict[str, str] = field(default_factory=dict)
    suspects: dict[str, int] = field(default_factory=dict)
    marks: dict[str, tuple[str, float]] = field(default_factory=dict)

    @classmethod
    def of(cls, path: Path) -> Content:
        """Reads the file; empty if it cannot be read."""
        try:
            fields = json.loads(path.read_text(encoding="utf-8"))
            return cls(
                bool(fields["finished"]),
                {str(name): str(reason) for name, reason in fields["wrong"].items()},
                {str(name): int(times) for name, times in fields["suspects"].items()},
                {str(process): (str(name), float(since)) for process, (name, since) in fields["marks"].items()},
            )
        except (OSError, ValueError, KeyError, AttributeError, TypeError):
            return cls()

    def ended(self) -> list[str]:
        """The processes that have ended without removing their marks."""
        return [process for process, (_, since) in self.marks.items() if _has_ended(process, since)]

    def suspect(self, ended: list[str]) -> None:
        """Turns the marks of these processes into suspicion, once for each kernel: they may be the ranks of a run."""
        for name in {self.marks.pop(process)[0] for process in ended if process in self.marks}:
            self.suspects[name] = self.suspects.get(name, 0) + 1
            self.finished = False


class KernelFindings:
    """One process's access to the file at ``path``; None: there is no file, and nothing is stored."""

    def __init__(self, path: Path | None):
        self._path, self._process = path, _this_process()
        self._writing = threading.Lock()
        self._closed = False
        content = Content() if path is None else Content.of(path)
        self._ended = content.ended()  # before this run; the next run counts those that end in it
        content.suspect(self._ended)
        self._before = content.suspects
        self.finished = content.finished
        twice = {name: "it ended the process that compared it, twice" for name, n in self._before.items() if n > 1}
        self.wrong = twice | content.wrong

    def mark(self, name: str) -> None:
        """Sets this process's mark to a kernel that it is about to run."""

        def update(content: Content) -> None:
            content.marks[self._process] = (name, time.time())

        self._change(update)

    def finish(self, wrong: dict[str, str]) -> bool:
        """Stores the result of a complete comparison; returns whether that was possible."""

        def update(content: Content) -> None:
            content.wrong |= self.wrong | wrong
            content.suspects = {n: times for n, times in content.suspects.items() if times > self._before.get(n, 0)}
            content.finished = not content.suspects

        return self._change(update, last=True)

    def leave(self, wrong: dict[str, str]) -> None:
        """Ends the comparison early, with no suspect; its error may have shown some kernels to be ``wrong``."""
        self._change(lambda content: content.wrong.update(wrong), last=True)

    def _change(self, update: Callable[[Content], None], last: bool = False) -> bool:
        """Removes this process's mark from the file and applies ``update``; nothing changes after the ``last`` time."""
        if self._path is None or not self._writing.acquire(timeout=_LOCK_S):
            return False
        try:
            if self._closed:
                return False
            self._closed = last
            with _locked(self._path.parent):
                content = Content.of(self._path)
                content.suspect(self._ended)
                content.marks.pop(self._process, None)
                update(content)
                write_text(self._path, json.dumps(asdict(content), indent=2) + "\n")
            return True
        except OSError:
            return False
        finally:
            self._writing.release()


_comparing: KernelFindings | None = None


@contextmanager
def marks_removed(findings: KernelFindings) -> Iterator[None]:
    """Removes the mark if another rank's failure ends this process within the block."""
    global _comparing
    _comparing = findings
    try:
        yield
    finally:
        _comparing = None


@before_end
def _remove_mark() -> None:
    """Removes the mark, unless other ranks have timed out waiting for this one: its kernel may hang."""
    if _comparing is not None and blameless():
        _comparing.leave({})


def _this_process() -> str:
    try:
        return name_of(os.getpid())
    except OSError:  # a system without /proc
        return f"{machine()} {os.getpid()} 0"


def _has_ended(process: str, since: float) -> bool:
    """Whether the process of a mark of this age has ended."""
    try:
        state = state_of(process)
    except ValueError:  # not the name of a process
        return True
    return state == "ended" or (state == "unknown" and time.time() - since > _ELSEWHERE_S)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Locks a folder against other processes that write; does nothing if the file system has no locks."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        until = time.monotonic() + _LOCK_S
        while time.monotonic() < until:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.01)
            except OSError:
                break
        yield
    finally:
        os.close(handle)
