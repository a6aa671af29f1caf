"""How a run of several processes ends when one of them fails: with that one's own error, shown first.

When a rank dies, its peers soon fail too, with an error of the transport that says nothing about the cause. The first
rank to fail leaves its error in the store of the run before it ends; a rank that fails later finds it there, and says
in one line whose error ended the run. Ranks that fail alike (a wrong path, say) show one traceback for the same reason.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from types import TracebackType

import torch.distributed as dist

ExceptHook = Callable[[type[BaseException], BaseException, TracebackType | None], object]

_STORE_WAIT = timedelta(seconds=5)  # longest wait for the store, and for the first error to be shown
_PEERS_S = 1.0  # how long the peers of a lost rank get to fail too, before they count as lost themselves

_reporter: _Reporter | None = None


def report_failures(*, connect: bool = False, brief: tuple[type[Exception], ...] = ()) -> None:
    """Makes an uncaught exception of this process end it at once, the run's first one with its full traceback.

    Nothing happens in a run of one process. Call it again after ``init_process_group``, which puts a hook of its own
    before this one, then with ``connect``: the store of the run is there. Errors of the types ``brief`` are a user's to
    mend: they end the run with one line and exit status 2.
    """
    global _reporter
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        _reporter = _reporter or _Reporter(sys.excepthook)
        sys.excepthook = _reporter
        _reporter.brief = brief or _reporter.brief
        if connect:
            _reporter.store = _connect()


class _Reporter:
    """A ``sys.excepthook``; ``show`` is the one that was there before and prints a traceback."""

    def __init__(self, show: ExceptHook):
        self.store: dist.Store | None = None
        self.brief: tuple[type[Exception], ...] = ()
        self._show = show
        self._rank = int(os.environ.get("RANK", "0"))
        self._world_size = int(os.environ["WORLD_SIZE"])

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        with suppress(ValueError):  # another thread than the main one may not
            # torchrun ends all ranks as soon as one has ended; this one is about to, and has something to say.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        interrupted, lost = issubclass(kind, KeyboardInterrupt), _is_transport_error(error)
        brief = isinstance(error, self.brief) and not lost
        code = 130 if interrupted else 2 if brief else 1
        mine = f"rank {self._rank}: {kind.__name__}: {error}".splitlines()[0].removesuffix(": ")
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
            _say(f"error: {error}")
        else:
            _say(f"[rank {self._rank}] failed and ends the run:")
            with suppress(Exception):
                self._show(kind, error, trace)
        with suppress(Exception):
            if lost:
                _say(f"[rank {self._rank}] {self._lost()}")
            assert self.store is not None
            self.store.set("shown", "")
        _end(code)

    def _first(self, mine: str) -> str:
        """Leaves this rank's error in the store, and returns the run's first one."""
        if self.store is None and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            self.store = _connect()  # torchrun's store is there from the beginning
        if self.store is None:
            return mine
        self.store.set(str(self._rank), mine)
        return self.store.compare_set("first", "", mine).decode()

    def _lost(self) -> str:
        """Which ranks it may have been, when the transport failed and no rank has told why."""
        assert self.store is not None
        store = self.store
        time.sleep(_PEERS_S)
        silent = [str(rank) for rank in range(self._world_size) if not store.check([str(rank)])]
        if not silent:
            return "every rank has failed in its communication, and none for a reason of its own"
        return (
            f"no word from rank {', '.join(silent)}: it hangs, or its process has ended without an error of its own "
            "(killed, perhaps for want of memory, or crashed)"
        )


def _connect() -> dist.Store:
    # A connection of its own: that of the process group may be in use by a thread that waits in it.
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=_STORE_WAIT)
    # torchrun keeps its store when it restarts the ranks.
    return dist.PrefixStore(f"dsa_engine/failure/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def _is_transport_error(error: BaseException) -> bool:
    words = ("gloo", "nccl", "connection", "timed out", "timeout")
    return isinstance(error, RuntimeError) and any(word in str(error).lower() for word in words)


def _say(text: str) -> None:
    with suppress(Exception):
        sys.stderr.write(text + "\n")  # in one piece: several processes share it
        sys.stderr.flush()


def _end(code: int) -> None:
    with suppress(Exception):
        sys.stdout.flush()
    # An orderly exit would wait for collectives that the other ranks no longer answer.
    os._exit(code)
