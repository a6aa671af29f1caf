"""Limits: sizes, times, waiting requests, the key, the end of the server."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from dsa_engine import LLM
from dsa_engine.server.admission import Admission
from dsa_engine.server.errors import ApiError

LONG = {"prompt": [5, 6], "max_tokens": 190, "ignore_eos": True}


@pytest.fixture(scope="module")
def tiny(tiny_llm: Callable[..., LLM]) -> LLM:
    return tiny_llm(600)


@pytest.fixture
def slow(tiny: LLM, monkeypatch: pytest.MonkeyPatch) -> Iterator[LLM]:
    """An engine whose steps take 10 ms more, so that a long request takes 2 seconds."""
    step = tiny.engine.step
    monkeypatch.setattr(tiny.engine, "step", lambda: (time.sleep(0.01), step())[1])
    yield tiny
    tiny.wait_idle()
    assert tiny.engine.scheduler.free_pages == [tiny.engine.cache.pages]


def raw(port: int, *parts: bytes, wait: float = 0.0) -> bytes:
    """What the server answers to bytes, sent in parts with a pause before each but the first."""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        for number, part in enumerate(parts):
            time.sleep(wait if number else 0)
            connection.sendall(part)
        got = b""
        while data := connection.recv(65536):
            got += data
        return got


def test_size_of_a_body(serve: Any, tiny: LLM) -> None:
    server = serve(tiny, max_body_size="2KiB")
    assert server.complete([5], max_tokens=1)
    message = server.refused("/v1/completions", 413, prompt="a" * 3000)
    assert "2.00 KiB" in message and "--max-body-size" in message
    chunked = server.post("/v1/completions", content=(b" " * 500 for _ in range(5)))  # its length is not announced
    assert chunked.status_code == 413
    huge = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: " + b"9" * 30 + b"\r\n\r\n"
    assert b"HTTP/1.1 4" in raw(server.port, huge)


def test_slow_senders(serve: Any, tiny: LLM) -> None:
    server = serve(tiny, body_timeout=0.3)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: 30\r\n\r\n"
    assert b"HTTP/1.1 408" in raw(server.port, head, b'{"pro', wait=0.1)
    started = time.monotonic()
    assert raw(server.port, b"POST /v1/comp") == b"" and raw(server.port) == b""  # no whole header
    assert raw(server.port, head + b'{"prompt": [5], "max_tokens":1}'[:30], b"GET /he", wait=0.1)
    assert time.monotonic() - started < 10
    assert server.complete([5], max_tokens=1)


def test_time_of_a_request(serve: Any, slow: LLM) -> None:
    server = serve(slow, request_timeout=0.2)
    assert "more than 0.2 seconds" in server.refused("/v1/completions", 504, **LONG)
    response = server.post("/v1/completions", json=LONG | {"stream": True})
    events = [line for line in response.text.split("\n\n") if line]
    assert response.status_code == 200 and events[-1] == "data: [DONE]"
    assert json.loads(events[-2][6:])["error"]["code"] == "timeout"
    assert server.complete([5], max_tokens=1)


def test_waiting_requests(serve: Any, slow: LLM) -> None:
    """At most 8 run and 2 wait; the 11th is refused, and told to come again."""
    server = serve(slow, max_waiting_requests=2)
    with ThreadPoolExecutor(20) as pool:
        responses = list(pool.map(lambda _: server.post("/v1/completions", json=LONG | {"max_tokens": 20}), range(20)))
    refused = [one for one in responses if one.status_code == 429]
    assert 10 <= len(refused) < 20 and {one.status_code for one in responses} == {200, 429}
    assert {one.headers["retry-after"] for one in refused} == {"1"}
    assert refused[0].json()["error"]["type"] == "rate_limit_error"
    assert server.complete([5], max_tokens=1)


def test_the_key(serve: Any, tiny: LLM) -> None:
    server = serve(tiny, api_key="a secret")
    assert server.get("/health").status_code == server.get("/ready").status_code == 200
    for given in (
        {},
        {"Authorization": "a secret"},
        {"Authorization": "Bearer a secres"},
        {"Authorization": "Bearer é"},
    ):
        for path in ("/v1/models", "/metrics", "/nowhere", "/tokenize"):
            response = server.get(path, headers={key: value.encode() for key, value in given.items()})
            assert response.status_code == 401 and response.json()["error"]["code"] == "invalid_api_key"
    assert server.get("/v1/models", headers={"Authorization": "Bearer a secret"}).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("timeout", [20.0, 0.2])
def test_the_end(serve: Any, slow: LLM, timeout: float, stream: bool) -> None:
    """SIGTERM: what runs ends, or gets an error after the timeout; what is new is refused."""
    server = serve(slow, shutdown_timeout=timeout)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(server.post, "/v1/completions", json=LONG | {"max_tokens": 40, "stream": stream})
        while not slow.engine.scheduler.has_work:
            time.sleep(0.01)
        server.http.handle_exit(signal.SIGTERM, None)
        while server.get("/ready").status_code == 200:
            time.sleep(0.01)
        assert server.get("/health").status_code == 200
        response = server.post("/v1/completions", json=LONG)
        assert response.status_code == 503 and response.headers["retry-after"] == "1"
        ended = running.result()
    if timeout > 1:
        assert ended.status_code == 200 and "shutting_down" not in ended.text
    else:
        assert ended.status_code == (200 if stream else 503) and "shutting_down" in ended.text
    until = time.monotonic() + 10
    with pytest.raises(httpx.TransportError):
        while time.monotonic() < until:
            server.get("/health")
            time.sleep(0.05)


def test_a_second_signal_does_not_wait(serve: Any, slow: LLM) -> None:
    server = serve(slow, shutdown_timeout=60.0)
    errors: list[Any] = []
    thread = threading.Thread(target=lambda: errors.append(server.post("/v1/completions", json=LONG).status_code))
    thread.start()
    while not slow.engine.scheduler.has_work:
        time.sleep(0.01)
    server.http.handle_exit(signal.SIGINT, None)
    server.http.handle_exit(signal.SIGINT, None)
    thread.join(5)
    assert errors == [503]


def test_an_engine_that_ends(serve: Any, tiny_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its requests get the error, liveness fails, the server ends and says so."""
    llm = tiny_llm(600)
    server = serve(llm)

    def broken() -> None:
        raise RuntimeError("the device is lost")

    monkeypatch.setattr(llm.engine.scheduler, "schedule", broken)
    response = server.post("/v1/completions", json=LONG)
    assert response.status_code >= 500 and "the device is lost" in response.json()["error"]["message"]
    until = time.monotonic() + 10
    with pytest.raises(httpx.TransportError):
        while time.monotonic() < until:
            assert server.get("/health").status_code == 503
            time.sleep(0.05)
    assert server.http.failed
    with pytest.raises(RuntimeError):
        llm.close()
        llm.generate([[5]])


def test_what_is_no_http(serve: Any, tiny: LLM) -> None:
    server = serve(tiny)
    assert b"invalid_request_error" in raw(server.port, b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n")
    assert server.put("/v1/models").json()["error"]["message"] == "/v1/models does not take PUT"
    for path in ("/v1/embeddings", "/v1/audio/speech", "/%ff%fe", "/v1/../../etc/passwd"):
        assert server.post(path, json={}).json()["error"]["type"] == "not_found_error"


@pytest.mark.parametrize("waits", [True, False])
def test_a_request_that_is_stopped_raises_the_error(waits: bool) -> None:
    """While it waits, and at the very moment when its work has ended: its task can wait again afterwards."""

    async def never() -> Any:
        await asyncio.sleep(60)

    async def main() -> None:
        admission = Admission(limit=1, timeout_s=None)
        with pytest.raises(ApiError, match="enough"):
            async with admission.admit(1, never) as admitted:
                loop = asyncio.get_running_loop()
                if waits:
                    loop.call_soon(admitted.stop, ApiError(503, "enough"))
                    await asyncio.sleep(60)
                admitted.stop(ApiError(503, "enough"))
        await asyncio.sleep(0)
        assert admission.empty and admission.outputs == 0

    asyncio.run(main())
