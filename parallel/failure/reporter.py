"""How a run of several processes ends when one of them fails: with that one's own error, shown first.

When a rank dies, its peers soon fail too, with an error of the transport that says nothing about the cause. The first
rank to fail leaves its error in the store of the run before it ends; a rank that fails later finds it there, and says
in one line whose error ended the run. Ranks that fail alike (a wrong path, say) show one traceback for the same reason.

A rank whose peer has failed may wait where no error arises: NCCL's collectives are waited for inside CUDA. So each has
a thread (:mod:`.watch`) that learns of the first error from the store, gives the main thread a moment to fail
by itself, and ends the process with the first one's exit status. On another machine it shows the traceback too. Whoever
ends waits until the others have read why, and kills those of its own machine that do not even run a thread.
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

import torch.distributed as dist

from dsa_engine.parallel.failure.peers import State, machine, name_of, state_of, wake
from dsa_engine.parallel.failure.store import STORE_WAIT, connect
from dsa_engine.parallel.failure.watch import LEFT, FailureWatch, ends, see_off
from dsa_engine.parallel.launch_environment import launched_rank, launched_store, several_processes

ExceptHook = Callable[[type[BaseException], BaseException, TracebackType | None], object]

_PEERS_S = 1.0  # how long the peers of a lost rank get to fail too, before they count as lost themselves
_OWN_S = 0.5  # how long the main thread gets to fail by itself after another rank has failed
_AFTER_S = 0.3  # the first rank ends before the others: torchrun's report names whose end it sees first
_LAST_S = 30.0  # an end that is held up itself (by a full pipe, say) takes no longer
_TRACE_LENGTH = 1 << 16  # most characters of a traceback that go to other machines

_reporter: _Reporter | None = None
_before_end: list[Callable[[], None]] = []


def report_failures(*, connect_s: float | None = None, brief: tuple[type[Exception], ...] = ()) -> None:
    """Makes an uncaught exception of this process end it at once, the run's first one with its full traceback.

    Nothing happens in a run of one process. Call it again after ``init_process_group``, which puts a hook of its own
    before this one. Errors of the types ``brief`` are a user's to mend: they end the run with one line and exit
    status 2.

    Args:
        connect_s: connect to the store of the run, within so many seconds.

    Raises:
        ValueError: the environment does not say where the store is.
        TimeoutError: whoever listens there does not answer as a store.
    """
    global _reporter
    if several_processes():
        _reporter = _reporter or _Reporter(sys.excepthook)
        sys.excepthook = _reporter
        _reporter.brief = brief or _reporter.brief
        if connect_s is not None:
            _reporter.connect(connect_s)


def run_store() -> dist.Store | None:
    """The store of the run, where :func:`report_failures` has connected to it."""
    return None if _reporter is None else _reporter.store


def before_end(call: Callable[[], None]) -> Callable[[], None]:
    """Has this called where a failure ends the process at once, without the cleaning up that an orderly exit brings.

    Perhaps in another thread than the main one, which may be anywhere.
    """
    _before_end.append(call)
    return call


def blameless() -> bool:
    """Whether another thread than the main one ends this process because another rank has failed, and that for a reason
    of its own: not in communication, where it may have waited for this process in vain."""
    return _reporter is not None and _reporter.blameless


def leave_run() -> None:
    """Leaves word that this process has come to the end of its program, before others miss it in a collective."""
    with suppress(Exception):
        if _reporter is not None and _reporter.store is not None:
            _reporter.store.set(ends(launched_rank()[0]), LEFT)


class _Reporter:
    """A ``sys.excepthook``; ``show`` is the one that was there before and prints a traceback."""

    def __init__(self, show: ExceptHook):
        self.store: dist.Store | None = None
        self.brief: tuple[type[Exception], ...] = ()
        self.blameless = False
        self._show = show
        self._rank, self._world_size = launched_rank()
        self._ending = threading.Lock()  # whose thread has it ends the process
        self._null = open(os.devnull, "w")  # noqa: SIM115 - for faulthandler, as long as the process lives

    def connect(self, patience_s: float) -> None:
        """Connects to the store, leaves word of this process there, and watches from now on whether a peer fails."""
        if self.store is None:
            self.store = connect(patience_s)
            self.store.set(f"process {self._rank}", name_of(os.getpid()))
            watch = FailureWatch(self._end_with)
            watch.start()
            atexit.register(watch.stop)

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        with suppress(ValueError):  # another thread than the main one may not
            # torchrun ends all ranks as soon as one has ended; this one is about to, and has something to say.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        self._ending.acquire()
        interrupted, lost = issubclass(kind, KeyboardInterrupt), _is_transport_error(error)
        brief = isinstance(error, self.brief) and not lost
        code = 130 if interrupted else 2 if brief else 1
        mine = _printable(f"rank {self._rank}: {kind.__name__}: {_text(error)}").splitlines()[0].removesuffix(": ")
        seen = self._states() if lost else {}  # at once: torchrun soon ends ranks that have done nothing
        try:
            first = self._first(mine)
        except Exception:  # the store has gone down with the process that held it
            first = "its peers and the store of the run are gone" if lost else mine
            self.store = None
        if first != mine:
            with suppress(Exception):
                assert self.store is not None
                self.store.wait(["shown"], STORE_WAIT)
            if not (brief and first.partition(": ")[2] == mine.partition(": ")[2]):  # all fail alike: once is enough
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
        """Ends this process, from the thread that watches, because another rank has failed."""
        first, code = store.get("first").decode(), 1
        with suppress(Exception):  # the first one may have been ended before it had shown anything
            store.wait(["shown"], STORE_WAIT)
            code = int(store.get("shown"))
        if not self._ending.acquire(timeout=_OWN_S):
            return  # the main thread has failed too, and ends the process
        faulthandler.dump_traceback_later(_LAST_S, exit=True, file=self._null)
        said = f"[rank {self._rank}] ends, because {first}"
        with suppress(Exception):
            mine = str(self._rank)
            if store.compare_set(f"told {machine()}", "", mine).decode() == mine:  # of this machine's ranks, one
                said = f"{said}\n{store.get('traceback').decode()}".rstrip()
        _say(said)
        self.blameless = not _names_transport(first)
        self.store = store  # that of the main thread may be in use
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
        # An orderly exit would wait for collectives that the other ranks no longer answer.
        os._exit(code)

    def _first(self, mine: str) -> str:
        """Leaves this rank's error in the store, and returns the run's first one."""
        if self.store is None and launched_store():
            self.connect(STORE_WAIT.total_seconds())  # torchrun's store is there from the beginning
        if self.store is None:
            return mine
        self.store.set(str(self._rank), mine)
        return self.store.compare_set("first", "", mine).decode()

    def _states(self) -> dict[int, State]:
        """Of the process of every rank that has not failed."""
        states: dict[int, State] = {}
        with suppress(Exception):
            assert self.store is not None
            for rank in range(self._world_size):
                if rank != self._rank and not self.store.check([str(rank)]):
                    if self.store.check([ends(rank)]):
                        states[rank] = "left"
                        continue
                    known = self.store.check([f"process {rank}"])
                    states[rank] = state_of(self.store.get(f"process {rank}").decode()) if known else "unknown"
        return states

    def _lost(self, seen: dict[int, State]) -> str:
        """Which ranks it may have been, when the transport failed and no rank has told why.

        Of the ranks on this machine it is known whether they live. A stopped one is woken: torchrun, which ends the
        ranks, would wait half a minute for it.

        Args:
            seen: the states of the ranks when the transport had failed.
        """
        assert self.store is not None
        time.sleep(_PEERS_S)
        now = self._states()
        gone = {rank: state for rank, state in seen.items() if rank in now and state != "running"}
        gone = gone or {rank: state for rank, state in now.items() if state != "running"}
        silent: dict[State, list[int]] = {}
        for rank, state in (gone or now).items():  # where one has gone, those that run wait for it
            silent.setdefault(state, []).append(rank)
            if state == "stopped":
                wake(self.store.get(f"process {rank}").decode())
        if not silent:
            return "every rank has failed in its communication, and none for a reason of its own"
        words = (f"rank {', '.join(map(str, ranks))}: {_SILENT[state]}" for state, ranks in silent.items())
        return "no word from " + "; from ".join(words)


_ENDED = "ended without an error of its own (killed, perhaps for want of memory, or crashed)"
_SILENT: dict[State, str] = {  # what may have happened to a rank of which nothing is heard, by its process's state
    "ended": f"its process has {_ENDED}",
    "left": "its program has come to its end (by sys.exit, or as it does less than the others)",
    "stopped": "its process was stopped (SIGSTOP, or Ctrl-Z); it has been woken, to end like the others",
    "running": "it hangs, though its process is alive",
    "unknown": f"it hangs, or its process has {_ENDED}",
}


def _is_transport_error(error: BaseException) -> bool:
    return isinstance(error, RuntimeError) and _names_transport(str(error))


def _names_transport(text: str) -> bool:
    return any(word in text.lower() for word in ("gloo", "nccl", "connection", "timed out", "timeout"))


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as failed:
        return f"(its text cannot be made: {type(failed).__name__})"


def _printable(text: str, encoding: str = "utf-8") -> str:
    """The text, with escapes for what cannot be encoded (half of a surrogate pair, from a file name)."""
    return text.encode(encoding, "backslashreplace").decode(encoding)


def _say(text: str) -> None:
    with suppress(Exception):
        text = _printable(text, sys.stderr.encoding or "utf-8")
        sys.stderr.write(text + "\n")  # in one piece: several processes share it
        sys.stderr.flush()
