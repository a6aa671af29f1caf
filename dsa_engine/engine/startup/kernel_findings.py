"""What comparisons of kernels have found, in a file of the cache folder that all processes of a kind of device share.

A process writes the name of a kernel there before it runs it for the first time, as its mark. A mark that outlives its
process says that the kernel may have ended it: the kernel is suspected, and counts as wrong when that has happened
twice. A process that is ended because another rank has failed takes its mark along.
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

_LOCK_S = 2.0  # longest wait for another process's writing
_ELSEWHERE_S = 300.0  # so old, a mark of another machine or container has outlived its process


@dataclass
class Content:
    """Of the file.

    Attributes:
        finished: everything was compared by some process, and no suspect is left.
        wrong: operations that run their reference, and why.
        suspects: how many runs have ended at a kernel without a word.
        marks: of each process that compares, the kernel that it is at, and since when.
    """

    finished: bool = False
    wrong: dict[str, str] = field(default_factory=dict)
    suspects: dict[str, int] = field(default_factory=dict)
    marks: dict[str, tuple[str, float]] = field(default_factory=dict)

    @classmethod
    def of(cls, path: Path) -> Content:
        """What stands in the file; nothing where it cannot be read."""
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            return cls(
                bool(found["finished"]),
                {str(name): str(reason) for name, reason in found["wrong"].items()},
                {str(name): int(times) for name, times in found["suspects"].items()},
                {str(process): (str(name), float(since)) for process, (name, since) in found["marks"].items()},
            )
        except (OSError, ValueError, KeyError, AttributeError, TypeError):
            return cls()

    def outlived(self) -> list[str]:
        """The processes that have ended without taking their marks along."""
        return [process for process, (_, since) in self.marks.items() if _outlived(process, since)]

    def suspect(self, ended: list[str]) -> None:
        """Turns the marks of these processes, the ranks of a run, into suspicion: once for a kernel."""
        for name in {self.marks.pop(process)[0] for process in ended if process in self.marks}:
            self.suspects[name] = self.suspects.get(name, 0) + 1
            self.finished = False


class KernelFindings:
    """One process's view of the file at ``path``; of none at all where that is None."""

    def __init__(self, path: Path | None):
        self._path, self._process = path, _this_process()
        self._writing = threading.Lock()
        self._closed = False
        content = Content() if path is None else Content.of(path)
        self._ended = content.outlived()  # before this run: what is lost in it is counted by the next
        content.suspect(self._ended)
        self._before = content.suspects
        self.finished = content.finished
        twice = {name: "it ended the process that compared it, twice" for name, n in self._before.items() if n > 1}
        self.wrong = twice | content.wrong

    def mark(self, name: str) -> None:
        """Says that this process runs a kernel from now on."""

        def update(content: Content) -> None:
            content.marks[self._process] = (name, time.time())

        self._change(update)

    def finish(self, wrong: dict[str, str]) -> bool:
        """Everything was compared, and ``wrong`` was found; whether that could be written down."""

        def update(content: Content) -> None:
            content.wrong |= self.wrong | wrong
            content.suspects = {n: times for n, times in content.suspects.items() if times > self._before.get(n, 0)}
            content.finished = not content.suspects

        return self._change(update, last=True)

    def leave(self, wrong: dict[str, str]) -> None:
        """The comparison ends early; its error may have shown a kernel to be ``wrong``, and none is suspected."""
        self._change(lambda content: content.wrong.update(wrong), last=True)

    def _change(self, update: Callable[[Content], None], last: bool = False) -> bool:
        """Changes what stands in the file, this process's mark left out; after the ``last`` time nothing more."""
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
def taken_along(findings: KernelFindings) -> Iterator[None]:
    """Within, another rank's failure that ends this process takes its mark away."""
    global _comparing
    _comparing = findings
    try:
        yield
    finally:
        _comparing = None


@before_end
def _take_mark_away() -> None:
    """Not where others have waited for this rank in vain: it may be its kernel that hangs."""
    if _comparing is not None and blameless():
        _comparing.leave({})


def _this_process() -> str:
    try:
        return name_of(os.getpid())
    except OSError:  # a system without /proc
        return f"{machine()} {os.getpid()} 0"


def _outlived(process: str, since: float) -> bool:
    """Whether a mark's process has ended."""
    try:
        state = state_of(process)
    except ValueError:  # no name of a process
        return True
    return state == "ended" or (state == "unknown" and time.time() - since > _ELSEWHERE_S)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keeps other processes from writing in a folder; where it has no locks, nobody is kept."""
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
