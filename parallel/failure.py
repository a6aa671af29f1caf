"""How a run of several processes ends when one of them fails: with that one's own error, shown first.

When a rank dies, its peers soon fail too, with an error of the transport that says nothing about the cause. The first
rank to fail leaves its error in the store of the run before it ends; a rank that fails later finds it there, and says
in one line whose error ended the run. Ranks that fail alike (a wrong path, say) show one traceback for the same reason.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from types import TracebackType

import torch.distributed as dist

from dsa_engine.parallel.launch_environment import launched_rank, launched_store, several_processes
from dsa_engine.parallel.peers import State, name_of, state_of, wake

ExceptHook = Callable[[type[BaseException], BaseException, TracebackType | None], object]

_STORE_WAIT = timedelta(seconds=5)  # longest wait for the store, and for the first error to be shown
_PEERS_S = 1.0  # how long the peers of a lost rank get to fail too, before they count as lost themselves

_reporter: _Reporter | None = None


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


class _Reporter:
    """A ``sys.excepthook``; ``show`` is the one that was there before and prints a traceback."""

    def __init__(self, show: ExceptHook):
        self.store: dist.Store | None = None
        self.brief: tuple[type[Exception], ...] = ()
        self._show = show
        self._rank, self._world_size = launched_rank()

    def connect(self, patience_s: float) -> None:
        """Connects to the store, and leaves word of this process there for :meth:`_lost`."""
        if self.store is None:
            self.store = _connect(patience_s)
            self.store.set(f"process {self._rank}", name_of(os.getpid()))

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        with suppress(ValueError):  # another thread than the main one may not
            # torchrun ends all ranks as soon as one has ended; this one is about to, and has something to say.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
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
                self.store.wait(["shown"], _STORE_WAIT)
            if not (brief and first.partition(": ")[2] == mine.partition(": ")[2]):  # all fail alike: once is enough
                _say(f"[rank {self._rank}] ends, because {first}")
            _end(code)
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
            self.store.set("shown", "")
        _end(code)

    def _first(self, mine: str) -> str:
        """Leaves this rank's error in the store, and returns the run's first one."""
        if self.store is None and launched_store():
            self.connect(_STORE_WAIT.total_seconds())  # torchrun's store is there from the beginning
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
    "stopped": "its process was stopped (SIGSTOP, or Ctrl-Z); it has been woken, to end like the others",
    "running": "it hangs, though its process is alive",
    "unknown": f"it hangs, or its process has {_ENDED}",
}


def _connect(patience_s: float) -> dist.Store:
    # A connection of its own: that of the process group may be in use by a thread that waits in it.
    if not {"MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        raise ValueError(
            "MASTER_ADDR and MASTER_PORT must be in the environment of several processes; torchrun sets them"
        )
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    found: list[dist.Store | Exception] = []

    def connect() -> None:
        wait = timedelta(seconds=patience_s)
        try:
            found.append(dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=wait))
        except Exception as error:
            found.append(error)

    # PyTorch's own timeout does not hold where somebody accepts the connection and then says nothing.
    thread = threading.Thread(target=connect, daemon=True, name="dsa_engine store")
    thread.start()
    thread.join(patience_s + _PEERS_S)
    if not found:
        raise TimeoutError(
            f"{host}:{port} (MASTER_ADDR, MASTER_PORT) accepts connections, but has not answered as the store of a run "
            f"for {patience_s:g} seconds: something else listens there; choose another port"
        )
    if isinstance(found[0], Exception):
        raise found[0]
    found[0].set_timeout(_STORE_WAIT)
    # torchrun keeps its store when it restarts the ranks.
    return dist.PrefixStore(f"dsa_engine/failure/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", found[0])


def _is_transport_error(error: BaseException) -> bool:
    words = ("gloo", "nccl", "connection", "timed out", "timeout")
    return isinstance(error, RuntimeError) and any(word in str(error).lower() for word in words)


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


def _end(code: int) -> None:
    with suppress(Exception):
        sys.stdout.flush()
    # An orderly exit would wait for collectives that the other ranks no longer answer.
    os._exit(code)
