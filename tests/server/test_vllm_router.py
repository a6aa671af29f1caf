"""``vllm-router`` in front of two servers, as docs/SERVING.md shows it: a server is killed and comes back."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import openai
import pytest
from openai import OpenAI

ROUTER = Path(sys.executable).with_name("vllm-router")
STARTED_S, ANSWERED_S = 120, 30
EVENTS: dict[str, str] = {}  # by URL of a server


class Process:
    """A command that listens for HTTP; it is killed with the block."""

    def __init__(self, log: Path, *words: str):
        self._log, self._words = log, words

    def __enter__(self) -> Process:
        with self._log.open("a") as log:
            environment = os.environ | {"OMP_NUM_THREADS": "1"}
            self.process = subprocess.Popen(self._words, stdout=log, stderr=log, env=environment)
        return self

    def __exit__(self, *_: object) -> None:
        kill(self)

    def await_status(self, url: str) -> None:
        until = time.monotonic() + STARTED_S
        while time.monotonic() < until and self.process.poll() is None:
            try:
                if httpx.get(url, trust_env=False).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.1)
        raise AssertionError(self._log.read_text())


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        made = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [one.getsockname()[1] for one in made]


def kill(process: Process) -> None:
    process.process.kill()
    process.process.wait(ANSWERED_S)


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Process]]:
    """Two servers of the demo model by URL; ``EVENTS`` says where each publishes its events."""
    folder = tmp_path_factory.mktemp("servers")
    made = {}
    ports = free_ports(4)
    for port, events_port in zip(ports[:2], ports[2:]):
        EVENTS[f"http://127.0.0.1:{port}"] = endpoint = f"tcp://127.0.0.1:{events_port}"
        events = {"enable_kv_cache_events": True, "endpoint": endpoint}
        words = ("-m", "dsa_engine", "serve", "demo", "--device", "cpu", "--port", str(port))
        words += ("--kv-events-config", json.dumps(events))
        made[f"http://127.0.0.1:{port}"] = Process(folder / str(port), sys.executable, *words)
    with ExitStack() as stack:
        for process in made.values():
            stack.enter_context(process)
        for url, process in made.items():
            process.await_status(f"{url}/ready")
        yield made


@pytest.fixture
def route(servers: dict[str, Process], tmp_path: Path) -> Iterator[Callable[..., OpenAI]]:
    """``route("--policy", "cache_aware")``: a client of a router before both servers."""
    with ExitStack() as stack:

        def start(*options: str) -> OpenAI:
            port, metrics = map(str, free_ports(2))
            words = ("--host", "127.0.0.1", "--port", port, "--prometheus-port", metrics, "--worker-urls", *servers)
            process = stack.enter_context(Process(tmp_path / "router", str(ROUTER), *words, *options))
            process.await_status(f"http://127.0.0.1:{port}/health")
            return OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", timeout=ANSWERED_S, max_retries=3)

        yield start


def test_kv_aware(servers: dict[str, Process], route: Callable[..., OpenAI]) -> None:
    """Each server has computed other prompts; the router knows them by the servers' events alone."""
    sources = [word for url in servers for word in ("--kv-event-source", f"{url}={EVENTS[url]}")]
    for url in servers:
        about = {"endpoint": EVENTS[url], "topic": "", "data_parallel_rank": 0, "replay_endpoint": None}
        assert httpx.get(f"{url}/kv_event_sources", trust_env=False).json() == [about]
    client = route("--policy", "kv_aware", "--kv-event-block-size", "64", "--kv-event-model", "demo", *sources)
    time.sleep(1)  # until the router listens to the events

    def cached(asked: OpenAI, number: int, *, chat: bool) -> int:
        text = f"{number} " + "The quick brown fox jumps over the lazy dog. " * 30
        if chat:
            answer = asked.chat.completions.create(
                model="demo", messages=[{"role": "user", "content": text}], max_tokens=2
            )
            usage = answer.usage
        else:
            usage = asked.completions.create(model="demo", prompt=text, max_tokens=2).usage
        assert usage is not None and usage.prompt_tokens_details is not None
        return usage.prompt_tokens_details.cached_tokens or 0

    for number in range(6):
        url = list(servers)[number % 2]
        with OpenAI(base_url=f"{url}/v1", api_key="none") as own:
            assert cached(own, number, chat=number < 3) < 64
    time.sleep(1)  # until the events have come
    assert min(cached(client, number, chat=number < 3) for number in range(6)) >= 64


def test_cache_aware(servers: dict[str, Process], route: Callable[..., OpenAI]) -> None:
    health = ("--health-check-interval-secs", "1", "--health-failure-threshold", "1", "--health-success-threshold", "1")
    client = route("--policy", "cache_aware", *health)

    def ask(question: str, *, stream: bool = False) -> str:
        given = {"model": "demo", "messages": [{"role": "user", "content": question}], "max_tokens": 8}
        if not stream:
            return client.chat.completions.create(**given, temperature=0).choices[0].message.content or ""
        chunks = client.chat.completions.create(**given, temperature=0, stream=True)
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)

    text = ask("Hello")
    assert text and ask("Hello", stream=True) == text
    prompt = "Once upon a time"
    completion = client.completions.create(model="demo", prompt=prompt, max_tokens=8, temperature=0)
    parts = client.completions.create(model="demo", prompt=prompt, max_tokens=8, temperature=0, stream=True)
    assert "".join(part.choices[0].text for part in parts) == completion.choices[0].text != ""
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.completions.create(model="demo", prompt=prompt, temperature=-1)

    (url, victim), (_, other) = servers.items()
    kill(victim)
    assert {ask("Hello", stream=number % 2 == 1) for number in range(6)} == {text}, "the other one answers"
    victim.__enter__()
    victim.await_status(f"{url}/ready")
    time.sleep(2.5)  # two checks of its health
    kill(other)
    assert ask("Hello") == ask("Hello", stream=True) == text, "the one that came back answers"
