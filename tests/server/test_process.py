"""The two ends of the connection between the engine and the HTTP server, and the process of the latter."""

from __future__ import annotations

import asyncio
import os
import pickle
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import httpx
import pytest

from dsa_engine import LLM, SamplingParams
from dsa_engine.engine.requests.messages import Abort, Add
from dsa_engine.server.listen import bind, url_of
from dsa_engine.server.metrics import Metrics
from dsa_engine.server.options import ServerOptions
from dsa_engine.server.remote.client import EngineClient
from dsa_engine.server.remote.messages import EngineFacts, Failed, NewTokens
from dsa_engine.server.remote.process import HttpProcess
from dsa_engine.server.remote.relay import Relay

PARAMS = SamplingParams(max_tokens=9, ignore_eos=True, temperature=0.0)


@pytest.fixture(scope="module")
def tiny(tiny_llm: Callable[..., LLM]) -> LLM:
    return tiny_llm(600, max_num_seqs=8)


@pytest.fixture
def other_end(tiny: LLM) -> Iterator[Connection]:
    """The connection of a process that asks; afterwards all pages are free."""
    own, others = Pipe()
    relay = Relay(tiny, own)
    try:
        yield others
    finally:
        others.close()
        relay.close()
        tiny.wait_idle()
        assert tiny.engine.scheduler.free_pages == [tiny.engine.cache.pages]


def test_the_tokens_of_a_step_are_one_message(tiny: LLM, other_end: Connection) -> None:
    """Requests have the other process's numbers; the last tokens come with the counts of the request."""
    wanted = [one.token_ids for one in tiny.generate([[number] for number in range(5, 13)], PARAMS)]
    assert isinstance(other_end.recv(), EngineFacts)
    other_end.send([Add([number], PARAMS, id=100 + number) for number in range(5, 13)])
    tokens: dict[int, list[int]] = {100 + number: [] for number in range(5, 13)}
    messages, ended = 0, 0
    while ended < len(tokens):
        message: list[NewTokens] = other_end.recv()
        messages += 1
        assert len({one.id for one in message}) == len(message)
        for one in message:
            tokens[one.id] += [sampled.token for sampled in one.tokens]
            ended += one.ending is not None
            assert (one.record is None) == (one.ending is None)
    assert list(tokens.values()) == wanted
    assert messages == 9, "eight requests of nine tokens run together"


def test_requests_end_with_their_caller(tiny: LLM, other_end: Connection) -> None:
    """One is aborted, the others end when the other process has gone; see the fixture."""
    long = SamplingParams(max_tokens=150, ignore_eos=True)
    other_end.recv()
    other_end.send([Add([number], long, id=number) for number in range(3)])
    other_end.recv()
    other_end.send(Abort((1, 77)))
    until = time.monotonic() + 60
    while len(tiny.engine.scheduler.running) != 2:
        assert time.monotonic() < until
        other_end.recv()


class _Unusual(Exception):
    """It cannot be pickled: its text does not make it."""

    def __init__(self, first: int, second: int):
        super().__init__(f"{first} and {second}")


@pytest.mark.parametrize("error", [ValueError("no"), _Unusual(1, 2)])
def test_an_error_of_a_step_reaches_its_caller(tiny: LLM, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    assert str(error) in str(pickle.loads(pickle.dumps(Failed.of(3, error))).error)
    own, others = Pipe()
    relay = Relay(tiny, own)

    def failing(*args: Any) -> Any:
        raise error

    async def ask(client: EngineClient) -> None:
        with monkeypatch.context() as broken:
            broken.setattr(tiny.engine.runner, "launch", failing)
            with pytest.raises(Exception, match=str(error)):
                await client.agenerate([[5], [6]], PARAMS)
        (output,) = await client.agenerate([[5]], PARAMS)
        assert len(output.token_ids) == 9
        assert (await client.state()).running == 0
        relay.close()
        with pytest.raises(ConnectionError, match="the process of the engine has ended"):
            await client.agenerate([[5]], PARAMS)
        with pytest.raises(ConnectionError):
            await client.state()

    client = EngineClient(others)
    asyncio.run(ask(client))
    client.close()


def ready(url: str) -> None:
    until = time.monotonic() + 60
    while time.monotonic() < until:
        try:
            if httpx.get(f"{url}/ready").status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.05)
    raise AssertionError("the server does not answer")


@pytest.mark.parametrize("number, status", [(signal.SIGTERM, 0), (signal.SIGKILL, -signal.SIGKILL)])
def test_the_end_of_the_process(tiny: LLM, number: signal.Signals, status: int) -> None:
    """In order after a signal to this process, and when it is killed; then its port is free."""
    bound = bind("127.0.0.1", 0)
    url = url_of(bound)
    http = HttpProcess(tiny, ServerOptions(), bound)
    ready(url)
    assert httpx.post(f"{url}/v1/completions", json={"prompt": [5], "max_tokens": 2}).status_code == 200
    started = re.compile("^process_start_time_seconds .*", re.MULTILINE)
    (own,) = started.findall(Metrics(os.getpid(), "").text(None).decode())
    assert started.findall(httpx.get(f"{url}/metrics").text) == [own], "times and memory of the engine's process"
    if number == signal.SIGTERM:
        threading.Timer(0.2, lambda: os.kill(os.getpid(), number)).start()
    else:
        os.kill(http.pid, number)
    assert http.wait() == status
    assert not Path(f"/proc/{http.pid}").exists()
    with socket.create_server(("127.0.0.1", int(url.rpartition(":")[2]))):
        pass
    tiny.wait_idle()
