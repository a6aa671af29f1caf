"""The process of the HTTP server: started by that of the engine, which passes signals on, and ends with it.

Python runs one thread at a time. In the engine's process the events of many streams would delay the launches of the
next step, so HTTP, JSON and text are made here.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import subprocess
import sys
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from types import FrameType

from dsa_engine.llm import LLM
from dsa_engine.server.app import Server
from dsa_engine.server.options import ServerOptions
from dsa_engine.server.remote.client import EngineClient
from dsa_engine.server.remote.relay import Relay
from dsa_engine.server.run import HttpServer
from dsa_engine.system.logs import set_up_logging

logger = logging.getLogger(__name__)
_ENGINE_ENDED = 1  # exit status; the process has said so
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class HttpProcess:
    """A process that serves an engine of this one.

    Args:
        llm: on several ranks, all others follow; until they do, this waits.
        bound: a socket of :func:`.listen.bind`, which is closed here.

    Attributes:
        pid: of the process.
    """

    def __init__(self, llm: LLM, options: ServerOptions, bound: socket.socket):
        asyncio.run(llm.agenerate([]))  # the others must follow before the first request comes
        own, others = Pipe()
        own.send(options)  # not by the command line, which others can read: there may be a key
        with bound, others:
            handles = bound.fileno(), others.fileno()
            # Its own session: Ctrl-C reaches it through this process only, and once.
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, *map(str, handles)], pass_fds=handles, start_new_session=True
            )
        self.pid = self._process.pid
        self._relay = Relay(llm, own)

    def wait(self) -> int:
        """Waits for the end of the process, to which signals are passed on meanwhile; returns its exit status."""

        def pass_on(number: int, frame: FrameType | None) -> None:
            self.stop()

        before = {number: signal.signal(number, pass_on) for number in _SIGNALS}
        try:
            status = self._process.wait()
            if status not in (0, _ENGINE_ENDED):
                logger.error("the process of the HTTP server has ended with status %d", status)
            return status
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            self._relay.close()

    def stop(self) -> None:
        """Lets running requests end, see :class:`.draining.DrainingServer`; called again, ends them."""
        self._process.send_signal(signal.SIGTERM)


def main(listening: int, engine: int) -> None:
    """Serves at the socket ``listening`` the engine at the other end of the connection ``engine``."""
    set_up_logging()
    connection = Connection(engine)
    options: ServerOptions = connection.recv()
    client = EngineClient(connection)
    http = HttpServer(Server(client, options), socket.socket(fileno=listening))
    http.run()
    sys.exit(_ENGINE_ENDED if http.failed else 0)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
