"""One end of the connection between two processes: a thread that sends and a thread that receives."""

from __future__ import annotations

import os
import pickle
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any


class Channel:
    """Sends and receives objects, in order, without waiting for the other process.

    Args:
        connection: this process's end.
        receive: called with each object that comes, in a thread of the channel.
        closed: called there once the other process has ended or closed its end, or the connection is broken.
    """

    def __init__(self, connection: Connection, receive: Callable[[Any], None], closed: Callable[[], None]):
        self._connection, self._receive, self._closed = connection, receive, closed
        self._outgoing: SimpleQueue[Any] = SimpleQueue()
        self._threads = [
            threading.Thread(target=work, name=f"dsa_engine {name}", daemon=True)
            for name, work in (("sender", self._send_all), ("receiver", self._receive_all))
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def send(self, item: Any) -> None:
        """Sends an object soon; after the end of the connection nothing happens."""
        self._outgoing.put((item,))

    def close(self) -> None:
        """Sends what is to be sent, and closes this end; returns when the threads have ended."""
        self._outgoing.put(None)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()

    def _send_all(self) -> None:
        with suppress(OSError):  # the receiver notices it too
            while (one := self._outgoing.get()) is not None:
                self._connection.send_bytes(pickle.dumps(one[0], pickle.HIGHEST_PROTOCOL))
            # Not close(): the other thread reads, and would not be woken.
            with socket.socket(fileno=os.dup(self._connection.fileno())) as own:
                own.shutdown(socket.SHUT_RDWR)

    def _receive_all(self) -> None:
        try:
            with suppress(EOFError, OSError):
                while True:
                    self._receive(pickle.loads(self._connection.recv_bytes()))
        finally:
            self._closed()
