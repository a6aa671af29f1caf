"""What an HTTP process is started with: the socket, bound before the weights are loaded, and its first message.

The engine's process needs this, and nothing of HTTP, which takes half a second to import.
"""

from __future__ import annotations

import signal
import socket
from typing import Any

import msgspec

from dsa_engine.server.messages import EngineFacts

STOP = b"."
ENGINE_ENDED = 1  # exit status; the process has said so
SIGNALS = (signal.SIGTERM, signal.SIGINT)
BACKLOG = 2048  # connections that wait for a process to take them


class Start(msgspec.Struct):
    """What a process reads first; the processes of one server are numbered, and share a folder."""

    facts: EngineFacts
    folder: str
    options: dict[str, Any]
    listening: int
    shared: str
    number: int


def bind(host: str, port: int) -> socket.socket:
    """A socket bound to the address, not listening yet; port 0 is any free one."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, protocol)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
        except BaseException:
            bound.close()
            raise
    except OSError as error:
        raise OSError(
            f"cannot listen at {host}:{port}: {error.strerror or error}; give another --host or --port"
        ) from error
    return bound


def url_of(bound: socket.socket) -> str:
    """``http://127.0.0.1:8000``"""
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
