"""The socket of a server, bound before the weights are loaded, so that an address in use is known at once."""

from __future__ import annotations

import socket


def bind(host: str, port: int) -> socket.socket:
    """A socket bound to the address, not listening yet; port 0 is any free one.

    Raises:
        OSError: the address is in use, or not this machine's.
    """
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
