"""A thread that reads from the run's store that another rank has failed, even while the main thread waits.

It needs Python's lock, which waits inside CUDA, NCCL and other calls of PyTorch release. A rank that holds the lock (in
a library call that waits) is killed by another rank of its machine (:func:`see_off`). Only a failure that a rank has
stored ends the others. A slow rank ends nothing, and a store that is slow or drops connections for a while is asked
again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from dsa_engine.parallel.failure.peers import kill, state_of
from dsa_engine.parallel.failure.store import STORE_WAIT, connect, has_listener

if TYPE_CHECKING:
    import torch.distributed as dist

logger = logging.getLogger(__name__)

LEFT = "left"
_POLL_S = 0.5
_RETRY_S = 15.0  # longest pause between attempts: one without an answer leaves a waiting thread
_GONE_S = 60.0  # the store is given up after this time without a listener
_OTHERS_S = 5.0  # time for the other ranks to read why they end
_STOP_S = 10.0


class FailureWatch:
    """Asks the store, over a separate connection, twice a second whether there is a key "first".

    Args:
        failed: called in the thread, with the connection, when a rank has failed; ends the process.
    """

    def __init__(self, failed: Callable[[dist.Store], None]):
        self._failed = failed
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="dsa_engine failures")

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread at an orderly exit; a running thread could crash the ending interpreter."""
        self._over.set()
        self._thread.join(_STOP_S)

    def _watch(self) -> None:
        pause, absent = _POLL_S, 0.0  # absent: time since which the store has had no listener
        while True:
            absent = 0.0 if has_listener() else absent or time.monotonic()
            if absent and time.monotonic() - absent > _GONE_S:
                break
            try:
                if not absent:
                    store = connect(STORE_WAIT.total_seconds())
                    pause = _POLL_S
                    while not store.check(["first"]):
                        if self._over.wait(_POLL_S):
                            return
                    self._failed(store)
                    return
            except Exception as error:
                logger.debug("the store of the run has not answered (%s); it is tried again", error)
            if self._over.wait(pause):
                return
            pause = min(2 * pause, _RETRY_S)
        logger.warning(
            "the store of the run is gone, for %g seconds no process has listened there: should another rank fail, "
            "this one learns of it only from its communication, or after the timeout",
            _GONE_S,
        )


def see_off(store: dist.Store, rank: int, world_size: int) -> None:
    """Tells the other ranks that this one ends, and waits a few seconds until all of them end too.

    The store may belong to one of the processes. And torchrun ends all ranks as soon as one has ended, which it reports
    as the first to fail: so a rank that has left the run before also ends before. A rank of this machine that has not
    even stored an error by then holds Python's lock, or is stopped: it is killed.
    """
    store.set(end_key(rank), "")
    begun = {r: f"process {r}" for r in range(world_size) if r != rank}
    processes = {r: store.get(key).decode() for r, key in begun.items() if store.check([key])}
    until = time.monotonic() + _OTHERS_S
    while True:
        waiting = [r for r, process in processes.items() if state_of(process) != "ended"]
        if waiting and store.check([end_key(r) for r in waiting]):
            waiting = [r for r in waiting if _leaves(store, r, processes[r])]
        if not waiting:
            return
        if time.monotonic() > until:
            break
        time.sleep(0.05)
    for other in waiting:
        if not store.check([end_key(other)]) and not store.check([str(other)]):
            kill(processes[other])


def _leaves(store: dist.Store, rank: int, process: str) -> bool:
    """Whether the process of a rank of this machine still runs although its program has come to its end."""
    return state_of(process) == "running" and store.get(end_key(rank)).decode() == LEFT


def end_key(rank: int) -> str:
    """The store's key for the end of a rank; its value is LEFT at the end of the program, "" after a failure."""
    return f"ends {rank}"
