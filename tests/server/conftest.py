"""Servers for the tests, at a free port of the loopback interface; HTTP and engine are both in this process, connected
as two processes are."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx
import pytest

from dsa_engine import LLM
from dsa_engine.server.app import Server
from dsa_engine.server.client import EngineClient
from dsa_engine.server.http import HttpServer
from dsa_engine.server.options import ServerOptions, bind
from dsa_engine.server.process import Relay


class Running(httpx.Client):
    """A client of a server that runs: ``post("/v1/completions", json=…)``.

    Attributes:
        http: the server under uvicorn.
        port: where it listens.
    """

    def __init__(self, http: HttpServer):
        super().__init__(base_url=http.url, timeout=60)
        self.http, self.port = http, int(http.url.rpartition(":")[2])

    def complete(self, prompt: Any, **parameters: Any) -> dict[str, Any]:
        """The answer of /v1/completions."""
        return self.answer("/v1/completions", prompt=prompt, **parameters)

    def chat(self, messages: Any, **parameters: Any) -> dict[str, Any]:
        """The answer of /v1/chat/completions."""
        return self.answer("/v1/chat/completions", messages=messages, **parameters)

    def answer(self, path: str, **body: Any) -> dict[str, Any]:
        response = self.post(path, json=body)
        assert response.status_code == 200, response.text
        return response.json()

    def events(self, path: str, **body: Any) -> list[dict[str, Any]]:
        """The events of a stream, which must end in [DONE]."""
        lines = [line for line in self.post(path, json=body).text.split("\n\n") if line]
        assert lines[-1] == "data: [DONE]" and all(line.startswith("data: ") for line in lines), lines
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]

    def refused(self, path: str, status: int = 400, **body: Any) -> str:
        """The message of an error in OpenAI's form, with this status."""
        response = self.post(path, json=body)
        assert response.status_code == status, response.text
        assert response.json()["error"].keys() == {"message", "type", "param", "code"}
        return response.json()["error"]["message"]


@contextmanager
def running(llm: LLM, **options: Any) -> Iterator[Running]:
    relay = Relay(llm)
    client = EngineClient(relay.facts, relay.folder)
    http = HttpServer(Server(client, ServerOptions(port=0, **options)), bind("127.0.0.1", 0))
    thread = threading.Thread(target=http.run)
    thread.start()
    try:
        while not http.started and thread.is_alive():
            time.sleep(0.01)
        with Running(http) as running_client:
            yield running_client
    finally:
        http.handle_exit(signal.SIGINT, None)
        http.handle_exit(signal.SIGINT, None)  # ends requests that a failed test has left
        thread.join(20)
        relay.close()
        assert not thread.is_alive(), "the server does not end"


@pytest.fixture
def serve() -> Iterator[Callable[..., Running]]:
    """``serve(llm, **options)``: a running server, until the end of the test."""
    with ExitStack() as stack:
        yield lambda llm, **options: stack.enter_context(running(llm, **options))


@pytest.fixture(scope="module")
def demo_server(demo_random: LLM) -> Iterator[Running]:
    """A server of the random demo model."""
    options = {"served_model_name": ["demo", "other"], "allowed_origins": ["https://a.example"]}
    with running(demo_random, **options, trust_request_chat_template=True) as client:
        yield client


@pytest.fixture
def server(demo_server: Running, llm: LLM) -> Running:
    """The server of the random demo model; after each test no request may run and all pages must be free."""
    return demo_server
