"""The end of a run of several processes when one of them fails: its own error is shown, and shown first.

When a rank dies, its peers soon fail too, with a transport error that does not name the cause. The first rank to fail
stores its error in the store of the run before it ends; a rank that fails later reads it there, and prints one line
that names the rank and its error. Ranks that fail alike (a wrong path, say) show one traceback for the same reason.

A rank whose peer has failed may wait without an error: NCCL's collectives are waited for inside CUDA. So each rank has
a thread (:mod:`.watch`) that reads the first error from the store, gives the main thread a moment to fail by itself,
and ends the process with the exit status of the first rank. On another machine it shows the traceback too. A rank that
ends waits until the others have read the reason, and kills those of its machine that do not even run a thread.
"""

from __future__ import annotations

import atexit
import faulthandler
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING

from dsa_engine.parallel.failure.absence import FATES
from dsa_engine.parallel.failure.peers import State, machine, name_of, state_of, wake
from dsa_engine.parallel.failure.store import STORE_WAIT, connect, has_listener
from dsa_engine.parallel.failure.watch import LEFT, FailureWatch, end_key, see_off
from dsa_engine.parallel.launch_environment import launched_rank, launched_store, several_processes, store_address

if TYPE_CHECKING:
    import torch.distributed as dist

ExceptHook = Callable[[type[BaseException], BaseException, TracebackType | None], object]

_PEERS_S = 1.5  # time for the peers of a lost rank to answer, or to fail too, before they count as lost themselves
_OWN_S = 0.5  # time for the main thread to fail by itself after another rank has failed
_AFTER_S = 0.3  # the others end after the first rank: torchrun reports the process whose end it sees first
_LAST_S = 30.0  # limit for an end that is itself held up (by a full pipe, say)
_TRACE_LENGTH = 1 << 16  # the last characters of a traceback that go to other machines

_reporter: _Reporter | None = None
_before_end: list[Callable[[], None]] = []


def report_failures(*, connect_s: float | None = None, brief: tuple[type[Exception], ...] = ()) -> None:
    """Makes an uncaught exception end this process at once; the run's first one is shown with its full traceback.

    Does nothing in a run of one process. Call it again after ``init_process_group``, which installs another hook before
    this one.

    Args:
        connect_s: connect to the store of the run, within this many seconds.
        brief: types of errors that the user can correct: they end the run with one line and exit status 2.

    Raises:
        ValueError: the environment has no address of the store.
        TimeoutError: the process at that address does not answer as a store.
    """
    global _reporter
    if several_processes():
        _reporter = _reporter or _Reporter(sys.excepthook)
        sys.excepthook = _reporter
        _reporter.brief = brief or _reporter.brief
        if connect_s is not None:
            _reporter.connect(connect_s)


def run_store() -> dist.Store | None:
    """The store of the run, if :func:`report_failures` has connected to it."""
    return None if _reporter is None else _reporter.store


def before_end(call: Callable[[], None]) -> Callable[[], None]:
    """Registers a function for the end by a failure, which skips the cleaning up of an orderly exit.

    It may be called in another thread while the main thread runs.
    """
    _before_end.append(call)
    return call


def blameless() -> bool:
    """Whether the watching thread ends this process because another rank has failed by itself: not in communication,
    where that rank may have waited for this process in vain."""
    return _reporter is not None and _reporter.blameless


def leave_run() -> None:
    """Tells the other ranks that this process has come to the end of its program, before they miss it in a
    collective."""
    with suppress(Exception):
        if _reporter is not None and _reporter.store is not None:
            _reporter.store.set(end_key(launched_rank()[0]), LEFT)


class _Reporter:
    """A ``sys.excepthook``; ``show`` is the hook before it, which prints a traceback."""

    def __init__(self, show: ExceptHook):
        self.store: dist.Store | None = None
        self.brief: tuple[type[Exception], ...] = ()
        self.blameless = False
        self._show = show
        self._rank, self._world_size = launched_rank()
        self._ending = threading.Lock()  # the thread that acquires it ends the process
        self._null = open(os.devnull, "w")  # noqa: SIM115 - for faulthandler, as long as the process lives

    def connect(self, patience_s: float) -> None:
        """Connects to the store, registers this process there, and watches for failures of peers from now on."""
        if self.store is None:
            self.store = connect(patience_s)
            self.store.set(f"process {self._rank}", name_of(os.getpid()))
            watch = FailureWatch(self._end_with)
            watch.start()
            atexit.register(watch.stop)

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        with suppress(ValueError):  # only the main thread may set a handler
            # torchrun terminates all ranks as soon as one has ended; this one still has to report.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        self._ending.acquire()
        interrupted, lost = issubclass(kind, KeyboardInterrupt), is_transport_error(error)
        seen: dict[int, State] = {}
        brief = isinstance(error, self.brief) and not lost
        code = 130 if interrupted else 2 if brief else 1
        mine = _printable(f"rank {self._rank}: {kind.__name__}: {_text(error)}").splitlines()[0].removesuffix(": ")
        if lost and self.store is not None and not has_listener():
            self.store = None  # its machine may be cut off: a question would wait for many minutes
            first = self._alone()
        else:
            seen = self._states() if lost else {}  # at once: torchrun soon ends the other ranks
            try:
                first = self._first(mine)
            except Exception:  # the store has ended with the process that held it
                first = self._alone() if lost else mine
                self.store = None
        if first != mine:
            with suppress(Exception):
                assert self.store is not None
                self.store.wait(["shown"], STORE_WAIT)
            if not (brief and first.partition(": ")[2] == mine.partition(": ")[2]):  # alike: once is enough
                _say(f"[rank {self._rank}] ends, because {first}")
            self._end(code, _AFTER_S)
        if interrupted:
            _say(f"[rank {self._rank}] interrupted")
        elif brief:
            _say(f"error: {_text(error)}")
        else:
            _say(f"[rank {self._rank}] failed and ends the run:")
            with suppress(Exception):
                self._show(kind, error, trace)
        with suppress(Exception):
            if lost:
                _say(f"[rank {self._rank}] {self._lost(seen)}")
            assert self.store is not None
            full = "" if brief or interrupted else "".join(traceback.format_exception(kind, error, trace))
            self.store.set("traceback", _printable(full)[-_TRACE_LENGTH:])
            self.store.set(f"told {machine()}", str(self._rank))
            self.store.set("shown", str(code))
        self._end(code)

    def _end_with(self, store: dist.Store) -> None:
        """Ends this process, from the watching thread, because another rank has failed."""
        store.set(_answer_key(self._rank), "")
        first, code = store.get("first").decode(), 1
        with suppress(Exception):  # the first rank may have been killed before it had shown its error
            store.wait(["shown"], STORE_WAIT)
            code = int(store.get("shown"))
        if not self._ending.acquire(timeout=_OWN_S):
            return  # the main thread has failed too, and ends the process
        faulthandler.dump_traceback_later(_LAST_S, exit=True, file=self._null)
        said = f"[rank {self._rank}] ends, because {first}"
        with suppress(Exception):
            mine = str(self._rank)
            if store.compare_set(f"told {machine()}", "", mine).decode() == mine:  # one rank of each machine
                said = f"{said}\n{store.get('traceback').decode()}".rstrip()
        _say(said)
        self.blameless = not _names_transport(first)
        self.store = store  # the main thread's connection may be in use
        self._end(code, _AFTER_S)

    def _end(self, code: int, after_s: float = 0.0) -> None:
        for call in _before_end:
            with suppress(Exception):
                call()
        with suppress(Exception):
            assert self.store is not None
            see_off(self.store, self._rank, self._world_size)
            time.sleep(after_s)
        with suppress(Exception):
            sys.stdout.flush()
        # An orderly exit would wait for collectives with ranks that have ended.
        os._exit(code)

    def _first(self, mine: str) -> str:
        """Stores this rank's error, and returns the run's first error."""
        if self.store is None and launched_store():
            self.connect(STORE_WAIT.total_seconds())  # torchrun's store exists from the beginning
        if self.store is None:
            return mine
        self.store.set(str(self._rank), mine)
        return self.store.compare_set("first", "", mine).decode()

    def _alone(self) -> str:
        """The reason for the end of a rank that can ask no other rank."""
        host, port = store_address()
        return f"its peers and the store of the run are gone: {host}:{port} (MASTER_ADDR, MASTER_PORT) does not answer"

    def _states(self) -> dict[int, State]:
        """The state of the process of every rank that has not failed."""
        states: dict[int, State] = {}
        with suppress(Exception):
            assert self.store is not None
            for rank in range(self._world_size):
                if rank != self._rank and not self.store.check([str(rank)]):
                    if self.store.check([end_key(rank)]):
                        states[rank] = "left"
                        continue
                    known = self.store.check([f"process {rank}"])
                    states[rank] = state_of(self.store.get(f"process {rank}").decode()) if known else "unknown"
                    if states[rank] == "unknown" and self.store.check([_answer_key(rank)]):
                        states[rank] = "running"
        return states

    def _lost(self, seen: dict[int, State]) -> str:
        """A sentence on the ranks that may have caused a transport error that no rank has explained.

        For ranks of this machine it is known whether they live; those of other machines live if they have answered by
        now. A stopped one is woken: torchrun, which ends the ranks, would wait half a minute for it.

        Args:
            seen: the states of the ranks when the transport failed.
        """
        assert self.store is not None
        time.sleep(_PEERS_S)
        now = self._states()
        seen = {rank: now[rank] if state == "unknown" else state for rank, state in seen.items() if rank in now}
        gone = {rank: state for rank, state in seen.items() if state != "running"}
        gone = gone or {rank: state for rank, state in now.items() if state != "running"}
        silent: dict[State, list[int]] = {}
        for rank, state in (gone or now).items():  # if one has ended, the running ranks wait for it
            silent.setdefault(state, []).append(rank)
            if state == "stopped":
                wake(self.store.get(f"process {rank}").decode())
        if not silent:
            return "every rank has failed in its communication, and none for a reason of its own"
        words = (f"rank {', '.join(map(str, ranks))}: {FATES[state]}" for state, ranks in silent.items())
        return "no word from " + "; from ".join(words)


def _answer_key(rank: int) -> str:
    """The store's key that a rank sets when it has read that another one has failed."""
    return f"answers {rank}"


def is_transport_error(error: BaseException) -> bool:
    """Whether an error is that of a collective whose peer is gone or does not answer."""
    return isinstance(error, RuntimeError) and _names_transport(str(error))


def _names_transport(text: str) -> bool:
    return any(word in text.lower() for word in ("gloo", "nccl", "connection", "timed out", "timeout"))


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as failed:
        return f"(its text cannot be made: {type(failed).__name__})"


def _printable(text: str, encoding: str = "utf-8") -> str:
    """The text, with escapes for characters that cannot be encoded (half of a surrogate pair, from a file name)."""
    return text.encode(encoding, "backslashreplace").decode(encoding)


def _say(text: str) -> None:
    with suppress(Exception):
        text = _printable(text, sys.stderr.encoding or "utf-8")
        sys.stderr.write(text + "\n")  # one write: several processes share stderr
        sys.stderr.flush()
