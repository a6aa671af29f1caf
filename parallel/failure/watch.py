"""A thread that learns from the run's store that another rank has failed, whatever the main thread waits for.

It needs nothing of the main thread but that it does not hold Python's lock: waits inside CUDA and NCCL, and other calls
of PyTorch, release it. A rank that holds it (a call of some library that waits) is killed by another one of its machine
(:func:`see_off`). Only a failure that a rank has left word of ends anything: being slow ends nothing, and a store that
is slow, or drops its connections for a while, is asked again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

import torch.distributed as dist

from dsa_engine.parallel.failure.peers import kill, state_of
from dsa_engine.parallel.failure.store import STORE_WAIT, connect, has_listener

logger = logging.getLogger(__name__)

LEFT = "left"
_POLL_S = 0.5
_RETRY_S = 15.0  # longest pause before the store is tried again: an attempt that nobody answers leaves a thread behind
_GONE_S = 60.0  # a store where nobody has listened for so long is given up
_OTHERS_S = 5.0  # how long the other ranks get to read why they end
_STOP_S = 10.0


class FailureWatch:
    """Asks the store, over a connection of its own, twice a second whether there is a key "first".

    Args:
        failed: called in the thread, with the connection, once a rank has failed; ends the process.
    """

    def __init__(self, failed: Callable[[dist.Store], None]):
        self._failed = failed
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="dsa_engine failures")

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """At the end of a run that went well; a thread that runs on could crash the interpreter as it ends."""
        self._over.set()
        self._thread.join(_STOP_S)

    def _watch(self) -> None:
        pause, absent = _POLL_S, 0.0  # since when nobody has listened
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
            "the store of the run is gone, for %g seconds nobody has listened there: should another rank fail, this "
            "one learns of it only from its communication, or after the timeout",
            _GONE_S,
        )


def see_off(store: dist.Store, rank: int, world_size: int) -> None:
    """Leaves word that this rank ends, and waits a few seconds until all others have done so.

    The store may be in a process that ends with one of them, and torchrun ends all as soon as one has, of which it then
    says that it failed first: so whoever has left the run before ends before. A rank of this machine that has not even
    left an error by then holds Python's lock, or is stopped: it is killed.
    """
    store.set(ends(rank), "")
    begun = {r: f"process {r}" for r in range(world_size) if r != rank}
    processes = {r: store.get(key).decode() for r, key in begun.items() if store.check([key])}
    until = time.monotonic() + _OTHERS_S
    while True:
        waiting = [r for r, process in processes.items() if state_of(process) != "ended"]
        if waiting and store.check([ends(r) for r in waiting]):
            waiting = [r for r in waiting if _leaves(store, r, processes[r])]
        if not waiting:
            return
        if time.monotonic() > until:
            break
        time.sleep(0.05)
    for other in waiting:
        if not store.check([ends(other)]) and not store.check([str(other)]):
            kill(processes[other])


def _leaves(store: dist.Store, rank: int, process: str) -> bool:
    """Whether the process of a rank of this machine that has come to its end has not quite ended yet."""
    return state_of(process) == "running" and store.get(ends(rank)).decode() == LEFT


def ends(rank: int) -> str:
    """The key by which a rank says that it ends: because of a failure or, LEFT, at the end of its program."""
    return f"ends {rank}"
