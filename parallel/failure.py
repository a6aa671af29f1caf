"""A rank that fails ends the run: its own error is shown first, and the other ranks name it as they end.

The first rank to fail stores its error in the run's store. A thread of every rank reads it there, even while the main
thread waits inside NCCL, and ends the process; ``torchrun`` ends only the ranks of its node. A rank that is killed or
hangs has no error to store: its peers' collectives fail, or time out. They name ranks that do not answer.
"""

from __future__ import annotations

import atexit
import faulthandler
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING

from dsa_engine.parallel.launch_environment import launched_rank, launched_store, several_processes, store_address

if TYPE_CHECKING:
    import torch.distributed as dist

ExceptHook = Callable[[type[BaseException], BaseException, TracebackType | None], object]

logger = logging.getLogger(__name__)

_POLL_S = 0.5
_ANSWER_S = 5.0  # longest wait for an answer of the store, or for the first rank to show its error
_OTHERS_S = 3.0  # time for the other ranks to read why they end
_OWN_S = 0.5  # time for a main thread that has failed too to end the process
_AFTER_S = 0.3  # the others end after the first rank: torchrun reports the process whose end it sees first
_LAST_S = 30.0  # limit for an end that is itself held up (by a full pipe, or a store that cannot be reached)

SIGN_OF_LIFE = "rank {} lives"  # the key of a number that a rank raises as long as it lives, whatever it does

_reporter: _Reporter | None = None


def report_failures(*, connect_s: float | None = None, brief: tuple[type[Exception], ...] = ()) -> None:
    """Makes an uncaught exception end this process at once, in a run of several. Call it again after
    ``init_process_group``, which installs another hook before this one.

    Args:
        connect_s: connect to the store of the run, within this many seconds.
        brief: types of errors that the user can correct: they end the run with one line and exit status 2.
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


def is_transport_error(error: BaseException) -> bool:
    """Whether an error is that of a collective whose peer is gone or does not answer."""
    words = ("gloo", "nccl", "connection", "timed out", "timeout")
    return isinstance(error, RuntimeError) and any(word in str(error).lower() for word in words)


class _Reporter:
    """A ``sys.excepthook``; ``show`` is the hook before it, which prints a traceback.

    Keys of the store: "first", the run's first error; "rank N", once rank N has failed or has read of it; "shown", the
    exit status, when the first error has been printed; "over".
    """

    def __init__(self, show: ExceptHook):
        self.store: dist.Store | None = None
        self.brief: tuple[type[Exception], ...] = ()
        self._show = show
        self._rank, self._world_size = launched_rank()
        self._ending = threading.Lock()  # the thread that acquires it ends the process
        self._left = threading.Event()
        self._answers = 0  # of the store, to questions of the thread that watches

    def connect(self, patience_s: float) -> None:
        """Connects to the store, and watches for failures of other ranks from now on."""
        if self.store is None:
            self.store = _connect(patience_s)
            works: list[Callable[[], None]] = [self._watch]
            works += [] if launched_store() else [partial(self._guard, patience_s)]
            threads = [threading.Thread(target=work, daemon=True, name="dsa_engine failures") for work in works]
            for thread in threads:
                thread.start()

            def stop() -> None:  # a running thread could crash the ending interpreter
                self._left.set()
                for thread in threads:
                    thread.join(_ANSWER_S)

            atexit.register(stop)

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        with suppress(ValueError):  # only the main thread may set a handler
            # torchrun terminates all ranks as soon as one has ended; this one still has to report.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        self._ending.acquire()
        brief = isinstance(error, self.brief) and not is_transport_error(error)
        mine = f"rank {self._rank}: {kind.__name__}: {error}".splitlines()[0].removesuffix(": ")
        mine = mine.encode("utf-8", "backslashreplace").decode()  # a file's name may have half of a surrogate pair
        faulthandler.dump_traceback_later(_LAST_S, exit=True, file=2)
        first = mine
        with suppress(Exception):  # the store may have ended with the process that held it
            if self.store is None and launched_store():
                self.connect(_ANSWER_S)
            if self.store is not None:
                self.store.set(f"rank {self._rank}", "")
                first = self.store.compare_set("first", "", mine).decode()
        if first != mine:
            alike = brief and first.partition(": ")[2] == mine.partition(": ")[2]
            self._follow(self.store, None if alike else first)
        code = 1
        if issubclass(kind, KeyboardInterrupt):
            code = 130
            _say(f"[rank {self._rank}] interrupted")
        elif brief:
            code = 2
            _say(f"error: {error}")
        else:
            _say(f"[rank {self._rank}] failed and ends the run:")
            with suppress(Exception):
                self._show(kind, error, trace)
        with suppress(Exception):
            self._wait_for_others(code, lost=is_transport_error(error))
        if code == 1:
            _tell_torchrun(error)  # after the wait: torchrun has then seen the end of a killed rank, as the first
        with suppress(Exception):
            if self.store is not None:
                self.store.set("over", "")
        self._end(code)

    def _watch(self) -> None:
        try:
            store = _connect(_ANSWER_S)  # the other connection may be in use by the main thread
            while not store.check(["first"]):
                store.add(SIGN_OF_LIFE.format(self._rank), 1)
                self._answers += 1
                if self._left.wait(_POLL_S):
                    return
            first = store.get("first").decode()
            store.set(f"rank {self._rank}", "")
        except Exception as error:
            logger.info("the store of the run does not answer (%s): failures of other ranks are not read there", error)
            self._left.set()
            return
        if self._ending.acquire(timeout=_OWN_S):  # else the main thread has failed too, and ends the process
            faulthandler.dump_traceback_later(_LAST_S, exit=True, file=2)
            self._follow(store, first)

    def _guard(self, patience_s: float) -> None:
        """Ends this process if a question to the store has no answer for so long: rank 0, which has it, is stopped."""
        answers, silent = 0, 0.0
        while not self._left.wait(_POLL_S):
            silent = silent + _POLL_S if answers == self._answers else 0.0
            answers = self._answers
            if silent > patience_s:
                self._ending.acquire(timeout=_OWN_S)  # a main thread that has failed waits for the store, too
                self._follow(None, f"the store of the run, which rank 0 has, is silent for {patience_s:g} s: stopped")

    def _follow(self, store: dist.Store | None, first: str | None) -> None:
        """Ends this process after the rank that failed ``first``; None: says nothing."""
        code = 1
        with suppress(Exception):  # the first rank may have been killed before it had shown its error
            assert store is not None
            store.wait(["shown"], timedelta(seconds=_ANSWER_S))
            code = int(store.get("shown"))
        if first is not None:
            _say(f"[rank {self._rank}] ends, because {first}")
        with suppress(Exception):
            assert store is not None
            store.wait(["over"], timedelta(seconds=_ANSWER_S))
            time.sleep(_AFTER_S)
        self._end(code)

    def _wait_for_others(self, code: int, lost: bool) -> None:
        """Waits until the others know why they end; after a ``lost`` connection, names those that do not answer."""
        if (store := self.store) is None:
            return
        store.set("shown", str(code))
        others = [rank for rank in range(self._world_size) if rank != self._rank]
        until = time.monotonic() + _OTHERS_S
        while (silent := [r for r in others if not store.check([f"rank {r}"])]) and time.monotonic() < until:
            time.sleep(0.05)
        if lost and silent:
            ranks = ", ".join(map(str, silent))
            _say(f"[rank {self._rank}] no word from rank {ranks}: ended without an error, or stopped")

    def _end(self, code: int) -> None:
        with suppress(Exception):
            sys.stdout.flush()
        # An orderly exit would wait for collectives with ranks that have ended.
        os._exit(code)


def _connect(patience_s: float) -> dist.Store:
    """A new connection to the store of the run, with a prefix for this module's keys."""
    import torch.distributed as dist

    host, port = store_address()
    limit = timedelta(seconds=patience_s)
    try:
        store = dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=limit)
    except dist.DistError as error:
        raise TimeoutError(
            f"rank 0 has not come: no store of a run has answered at {host}:{port} (MASTER_ADDR, MASTER_PORT) for "
            f"{patience_s:g} seconds ({error}); start all ranks, with the same address and port"
        ) from error
    store.set_timeout(timedelta(seconds=_ANSWER_S))
    # torchrun keeps its store when it restarts the ranks.
    return dist.PrefixStore(f"dsa_engine/failure/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def _tell_torchrun(error: BaseException) -> None:
    """Writes the error where torchrun's report reads it, which then names this rank as the first to fail."""
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    with suppress(OSError):
        try:
            raise error
        except BaseException as raised:
            get_error_handler().record_exception(raised)


def _say(text: str) -> None:
    with suppress(Exception):
        sys.stderr.write(text + "\n")  # one write: several processes share stderr
        sys.stderr.flush()
