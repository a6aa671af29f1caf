"""The two ends of the connection between the engine and the HTTP server, and the process of the latter."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import zmq
from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest

from dsa_engine import LLM, SamplingParams
from dsa_engine.engine.requests.limits import Add
from dsa_engine.server import process
from dsa_engine.server.client import EngineClient
from dsa_engine.server.errors import EngineError, EngineGone
from dsa_engine.server.http import url_of
from dsa_engine.server.messages import NewRequest, encode, from_engine
from dsa_engine.server.options import ServerOptions, bind
from dsa_engine.server.process import Relay, serve

PARAMS = SamplingParams(max_tokens=9, ignore_eos=True, temperature=0.0)


@pytest.fixture(scope="module")
def tiny(tiny_llm: Callable[..., LLM]) -> LLM:
    return tiny_llm(600, max_num_seqs=8)


class OtherEnd:
    """The sockets of a process that asks."""

    def __init__(self, llm: LLM):
        self.relay = Relay(llm)
        context = zmq.Context.instance()
        self._tokens, self._requests = context.socket(zmq.PULL), context.socket(zmq.PUSH)
        self._tokens.bind(f"ipc://{self.relay.folder}/tokens")
        self._requests.connect(f"ipc://{self.relay.folder}/requests")

    def send(self, *messages: Any) -> None:
        self._requests.send(encode(messages))

    def recv(self) -> list[Any]:
        until = time.monotonic() + 60
        while True:
            assert time.monotonic() < until and self._tokens.poll(60_000)
            if messages := from_engine(self._tokens.recv()):  # an empty one says that the process is not stopped
                return messages

    def close(self) -> None:
        self._tokens.close(linger=0)
        self._requests.close(linger=0)
        self.relay.close()


@pytest.fixture
def other_end(tiny: LLM) -> Iterator[OtherEnd]:
    """Afterwards all pages are free."""
    made = OtherEnd(tiny)
    try:
        yield made
    finally:
        made.close()
        tiny.wait_idle()
        assert tiny.engine.scheduler.free_pages == [tiny.engine.cache.pages]


def requests(params: SamplingParams, *prompts: int, first: int) -> list[NewRequest]:
    return [NewRequest.of(Add([prompt], params, id=first + number)) for number, prompt in enumerate(prompts)]


def test_the_tokens_of_a_step_are_one_message(tiny: LLM, other_end: OtherEnd) -> None:
    """Requests have the other process's numbers; the last tokens come with the counts of the request."""
    wanted = [one.token_ids for one in tiny.generate([[number] for number in range(5, 13)], PARAMS)]
    other_end.send(*requests(PARAMS, *range(5, 13), first=100))
    tokens: dict[int, list[int]] = {number: [] for number in range(100, 108)}
    messages, ended = 0, 0
    while ended < len(tokens):
        (message,) = other_end.recv()
        messages, step = messages + 1, message.step
        for number, (token,) in zip(step.ids.tolist(), step.tokens.tolist(), strict=True):
            tokens[number].append(token)
        for one in step.ended:
            tokens[one.id] += one.tokens
            assert one.ending.reason == "length" and one.record.num_cached_tokens is not None
        ended += len(step.ended)
    assert list(tokens.values()) == wanted
    assert messages == 9, "eight requests of nine tokens run together"


def test_a_caller_that_waits_for_the_end_gets_one_message(tiny: LLM, other_end: OtherEnd) -> None:
    (wanted,) = tiny.generate([[5]], PARAMS)
    other_end.send(NewRequest.of(Add([5], PARAMS, id=7, delivery="end")))
    (message,) = other_end.recv()
    (ended,) = message.step.ended
    assert (ended.id, ended.tokens, len(message.step.ids)) == (7, wanted.token_ids, 0)
    assert ended.record.first_token_at < message.step.at, "though it came at the end"


def test_a_malformed_message_is_dropped(other_end: OtherEnd, caplog: pytest.LogCaptureFixture) -> None:
    other_end._requests.send(b"\xc1")
    other_end.send(*requests(PARAMS, 5, first=1))
    assert other_end.recv()[0].step.ids.tolist() == [1] and "is dropped" in caplog.text


def test_an_error_of_a_step_reaches_its_caller(tiny: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    relay = Relay(tiny)

    def failing(*args: Any) -> Any:
        raise ValueError("no")

    async def ask() -> None:
        client = EngineClient(relay.facts, relay.folder)
        client.connect()
        receiving = asyncio.ensure_future(client.receive())
        with monkeypatch.context() as broken:
            broken.setattr(tiny.engine.runner, "launch", failing)
            with pytest.raises(EngineError, match="ValueError: no"):
                await client.agenerate([[5], [6]], PARAMS)
        (output,) = await client.agenerate([[5]], PARAMS)
        assert len(output.token_ids) == 9
        assert (await client.state()).running == 0
        await asyncio.to_thread(relay.close)
        assert isinstance(await asyncio.wait_for(receiving, 20), EngineGone)
        with pytest.raises(EngineGone):
            await client.agenerate([[5]], PARAMS)
        with pytest.raises(EngineGone):
            await client.state()
        client.close()

    asyncio.run(ask())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_all_processes_while_they_start(tiny: LLM, number: signal.Signals) -> None:
    """As systemd sends it to a control group, and a terminal to a group: an end in order."""
    http = serve(tiny, ServerOptions(api_server_count=2), bind("127.0.0.1", 0))
    for pid in http.pids:
        os.kill(pid, number)
    threading.Timer(0.5, lambda: os.kill(os.getpid(), number)).start()
    assert http.wait() == 0
    tiny.wait_idle()


def test_a_module_in_the_working_folder_is_not_imported(
    tiny: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "fastapi.py").write_text("raise SystemExit(9)", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    http = serve(tiny, ServerOptions(), bind("127.0.0.1", 0))
    threading.Timer(0.5, http.stop).start()
    assert http.wait() == 0


def test_a_process_that_is_stopped_gets_no_connections(tiny: LLM) -> None:
    """They go to the other one, at once."""
    bound = bind("127.0.0.1", 0)
    url = url_of(bound)
    http = serve(tiny, ServerOptions(api_server_count=2), bound)
    ready(url)
    os.kill(http.pids[0], signal.SIGSTOP)
    try:
        for _ in range(20):
            assert httpx.get(f"{url}/health", timeout=60).status_code == 200
    finally:
        os.kill(http.pids[0], signal.SIGCONT)
        http.stop()
        assert http.wait() == 0


def test_an_engine_that_is_stopped(tmp_path: Path) -> None:
    """Status 503 until it goes on; its process ends without an abort."""
    log = tmp_path / "log"
    command = ["-m", "dsa_engine", "serve", "demo-random", "--device", "cpu", "--port", "0", "--cache-memory", "4MiB"]
    with log.open("w") as file:
        engine = subprocess.Popen([sys.executable, *command, "--max-model-len", "256"], stderr=file)
    try:
        until = time.monotonic() + 120
        while not (served := re.search(r"is served at (http://\S+)", log.read_text())):
            assert engine.poll() is None and time.monotonic() < until, log.read_text()
            time.sleep(0.1)
        with httpx.Client(base_url=served[1], timeout=60) as client:
            answers(client, 200)
            engine.send_signal(signal.SIGSTOP)
            answers(client, 503)
            body = {"prompt": [5], "max_tokens": 2, "temperature": 0.0}
            refused = client.post("/v1/completions", json=body)
            assert refused.status_code == 503 and "has said nothing for" in refused.json()["error"]["message"]
            engine.send_signal(signal.SIGCONT)
            answers(client, 200)
            assert client.post("/v1/completions", json=body).status_code == 200
        engine.send_signal(signal.SIGTERM)
        assert engine.wait(60) == 0, log.read_text()
    finally:
        engine.kill()
        engine.wait()


def answers(client: httpx.Client, status: int) -> None:
    """Waits until both routes of load balancers answer with this status."""
    until = time.monotonic() + 60
    while {client.get(path).status_code for path in ("/health", "/ready")} != {status}:
        assert time.monotonic() < until
        time.sleep(0.1)


def ready(url: str) -> None:
    until = time.monotonic() + 60
    while time.monotonic() < until:
        try:
            if httpx.get(f"{url}/ready").status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.05)
    raise AssertionError("the server does not answer")


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("number, status", [(signal.SIGTERM, 0), (signal.SIGKILL, -9), (signal.SIGSTOP, -9)])
def test_the_end_of_a_process(
    tiny: LLM,
    number: signal.Signals,
    status: int,
    count: int,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In order after a signal to this process, and if it or one of two is killed or stopped; then the port is free."""
    monkeypatch.setattr(process, "_SILENT_S", 3)
    bound = bind("127.0.0.1", 0)
    url = url_of(bound)
    http = serve(tiny, ServerOptions(api_server_count=count), bound)
    ready(url)
    assert httpx.post(f"{url}/v1/completions", json={"prompt": [5], "max_tokens": 2}).status_code == 200
    started = re.compile("^process_start_time_seconds .*", re.MULTILINE)
    registry = CollectorRegistry()
    ProcessCollector(pid=os.getpid, registry=registry)
    (own,) = started.findall(generate_latest(registry).decode())
    assert started.findall(httpx.get(f"{url}/metrics").text) == [own], "times and memory of the engine's process"
    if number == signal.SIGTERM:
        threading.Timer(0.2, lambda: os.kill(os.getpid(), number)).start()
    else:
        os.kill(http.pids[0], number)
    assert http.wait() == status
    assert not any(Path(f"/proc/{pid}").exists() for pid in http.pids)
    assert (f"HTTP process 1 of {count} (pid {http.pids[0]}) has ended with status -9" in caplog.text) == (status != 0)
    with socket.create_server(("127.0.0.1", int(url.rpartition(":")[2]))):
        pass
    tiny.wait_idle()
