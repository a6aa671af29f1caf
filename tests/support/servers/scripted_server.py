"""A server of the page whose answers the tests write."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from typing import Any, NamedTuple


class Scripted(NamedTuple):
    """A server whose answers a test sets: ``script`` gets the write function of a stream, or is (status, body)."""

    url: str
    script: list[Any]
    disconnected: Event


@contextmanager
def scripted_server(page: Path) -> Iterator[Scripted]:
    """Serves the folder ``page``, and streams as the tests write them."""
    script: list[Any] = []
    disconnected = Event()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args: object) -> None:
            pass

        def reply(self, status: int, body: bytes, kind: str = "application/json") -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Retry-After", "7")
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self) -> None:
            kinds = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
            file = page / ("index.html" if self.path == "/" else Path(self.path).name)
            if file.is_file():
                self.reply(200, file.read_bytes(), kinds[file.suffix])
            else:
                self.reply(200, json.dumps({"data": [{"id": "scripted"}]}).encode())

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            if self.path == "/tokenize":
                return self.reply(200, b'{"count": 300000, "max_model_len": 163840}')
            script_now = script.pop(0)
            if isinstance(script_now, tuple):
                status, body = script_now
                return self.reply(status, json.dumps(body).encode())
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Connection", "close")
            self.end_headers()
            try:
                script_now(lambda event: self.wfile.write(f"data: {json.dumps(event)}\r\n\r\n".encode()))
            except OSError:
                disconnected.set()
            self.close_connection = True

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield Scripted(f"http://127.0.0.1:{server.server_port}/", script, disconnected)
    server.shutdown()
    thread.join()
    server.server_close()
