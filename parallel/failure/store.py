"""The key-value store of a run: its processes exchange texts there, outside of collectives."""

from __future__ import annotations

import os
import socket
import threading
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch.distributed as dist

from dsa_engine.parallel.launch_environment import store_address

STORE_WAIT = timedelta(seconds=5)  # longest wait for an answer of the store
_MUTE_S = 1.0  # added to a connection's own timeout


def connect(patience_s: float) -> dist.Store:
    """A new connection to the store of the run, with a prefix for the keys of this room.

    Raises:
        ValueError: the environment has no address of the store.
        TimeoutError: no process at that address answers as a store.
    """
    import torch.distributed as dist

    # The process group's connection may be in use by a thread that waits in it.
    host, port = store_address()
    outcome: list[dist.Store | Exception] = []

    def attempt() -> None:
        wait = timedelta(seconds=patience_s)
        try:
            outcome.append(dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=wait))
        except Exception as error:
            outcome.append(error)

    # PyTorch's own timeout does not hold if the other side accepts the connection and then sends nothing.
    thread = threading.Thread(target=attempt, daemon=True, name="dsa_engine store")
    thread.start()
    thread.join(patience_s + _MUTE_S)
    answer = outcome[0] if outcome else None
    if answer is None or isinstance(answer, Exception):
        raise _why_silent(host, port, patience_s) from answer
    answer.set_timeout(STORE_WAIT)
    # torchrun keeps its store when it restarts the ranks.
    return dist.PrefixStore(f"dsa_engine/failure/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", answer)


def has_listener() -> bool:
    """Whether a process accepts connections at the store's address. Without one, PyTorch's own attempt takes its whole
    timeout and writes pages to stderr."""
    try:
        with socket.create_connection(store_address(), _MUTE_S):
            return True
    except (OSError, ValueError):  # ValueError: the environment no longer has the address
        return False


def _why_silent(host: str, port: int, waited_s: float) -> TimeoutError:
    """The error after an attempt to connect in vain."""
    where = f"{host}:{port} (MASTER_ADDR, MASTER_PORT)"
    try:
        with socket.create_connection((host, port), _MUTE_S):
            pass
    except socket.gaierror as error:
        return TimeoutError(f"there is no machine {host!r}: {error.strerror}; MASTER_ADDR must name that of rank 0")
    except OSError as error:
        return TimeoutError(
            f"rank 0 has not come: for {waited_s:g} seconds no process has answered at {where} "
            f"({error.strerror or error}); see whether rank 0 was started and still runs, on the machine that "
            "MASTER_ADDR names and with the same MASTER_PORT, and whether a firewall is between the machines"
        )
    return TimeoutError(
        f"{where} accepts connections, but has not answered as the store of a run for {waited_s:g} seconds: something "
        "else listens there; choose another port"
    )
