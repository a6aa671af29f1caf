"""The store of a run: where its processes leave word for each other, beside all collectives."""

from __future__ import annotations

import os
import socket
import threading
from datetime import timedelta

import torch.distributed as dist

STORE_WAIT = timedelta(seconds=5)  # longest wait for an answer of the store
_MUTE_S = 1.0  # how much longer than its own timeout a connection is waited for


def connect(patience_s: float) -> dist.Store:
    """A connection of its own to the store of the run, with a part of the keys for what this module's users leave.

    Raises:
        ValueError: the environment does not say where the store is.
        TimeoutError: whoever listens there does not answer as a store.
    """
    # A connection of its own: that of the process group may be in use by a thread that waits in it.
    host, port = _address()
    found: list[dist.Store | Exception] = []

    def attempt() -> None:
        wait = timedelta(seconds=patience_s)
        try:
            found.append(dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=wait))
        except Exception as error:
            found.append(error)

    # PyTorch's own timeout does not hold where somebody accepts the connection and then says nothing.
    thread = threading.Thread(target=attempt, daemon=True, name="dsa_engine store")
    thread.start()
    thread.join(patience_s + _MUTE_S)
    if not found:
        raise TimeoutError(
            f"{host}:{port} (MASTER_ADDR, MASTER_PORT) accepts connections, but has not answered as the store of a run "
            f"for {patience_s:g} seconds: something else listens there; choose another port"
        )
    if isinstance(found[0], Exception):
        raise found[0]
    found[0].set_timeout(STORE_WAIT)
    # torchrun keeps its store when it restarts the ranks.
    return dist.PrefixStore(f"dsa_engine/failure/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", found[0])


def has_listener() -> bool:
    """Whether anybody accepts connections where the store of the run was. PyTorch's own attempt, where nobody does,
    takes its whole timeout and writes pages to stderr."""
    try:
        with socket.create_connection(_address(), _MUTE_S):
            return True
    except (OSError, ValueError):  # ValueError: the environment no longer says where
        return False


def _address() -> tuple[str, int]:
    if not {"MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        raise ValueError(
            "MASTER_ADDR and MASTER_PORT must be in the environment of several processes; torchrun sets them"
        )
    return os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
