"""The key-value store of a run: its processes exchange texts there, outside of collectives."""

from __future__ import annotations

import os
import socket
import threading
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch.distributed as dist

STORE_WAIT = timedelta(seconds=5)  # longest wait for an answer of the store
_MUTE_S = 1.0  # added to a connection's own timeout


def connect(patience_s: float) -> dist.Store:
    """A new connection to the store of the run, with a prefix for the keys of this room.

    Raises:
        ValueError: the environment has no address of the store.
        TimeoutError: the process at that address does not answer as a store.
    """
    import torch.distributed as dist

    # The process group's connection may be in use by a thread that waits in it.
    host, port = _address()
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
    if not outcome:
        raise TimeoutError(
            f"{host}:{port} (MASTER_ADDR, MASTER_PORT) accepts connections, but has not answered as the store of a run "
            f"for {patience_s:g} seconds: something else listens there; choose another port"
        )
    if isinstance(outcome[0], Exception):
        raise outcome[0]
    outcome[0].set_timeout(STORE_WAIT)
    # torchrun keeps its store when it restarts the ranks.
    return dist.PrefixStore(f"dsa_engine/failure/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", outcome[0])


def has_listener() -> bool:
    """Whether a process accepts connections at the store's address. Without one, PyTorch's own attempt takes its whole
    timeout and writes pages to stderr."""
    try:
        with socket.create_connection(_address(), _MUTE_S):
            return True
    except (OSError, ValueError):  # ValueError: the environment no longer has the address
        return False


def _address() -> tuple[str, int]:
    if not {"MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        raise ValueError(
            "MASTER_ADDR and MASTER_PORT must be in the environment of several processes; torchrun sets them"
        )
    return os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
