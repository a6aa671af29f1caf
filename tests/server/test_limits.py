"""Limits: sizes, times, waiting requests, the key, the end of the server."""

from __future__ import annotations

import json
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from typing import Any

import httpx
import pytest
from fastapi import routing

from dsa_engine import LLM
from dsa_engine.server import errors, http
from dsa_engine.server.http import hosts_of
from dsa_engine.server.options import bind

LONG = {"prompt": [5, 6], "max_tokens": 190, "ignore_eos": True}
JSON = {"Content-Type": "application/json"}


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


def test_size_of_a_body(serve: Any, tiny: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors, "MAX_BODY_BYTES", 2048)
    server = serve(tiny)
    assert server.complete([5], max_tokens=1)
    message = server.refused("/v1/completions", 413, prompt="a" * 3000)
    assert "2.00 KiB" in message
    chunked = server.post("/v1/completions", content=(b" " * 500 for _ in range(5)))  # its length is not announced
    assert chunked.status_code == 413


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize"])
def test_a_text_of_too_many_bytes_is_not_encoded(server: Any, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    """The demo model's longest token has 21 bytes, and max_model_len is 2048."""
    tokenizer = server.http.app_server.llm.tokenizer
    assert tokenizer.longest_token == 21
    monkeypatch.setattr(type(tokenizer.hf), "encode", lambda *_, **__: pytest.fail("it is encoded"))
    text = "a" * (2048 * 21 + 1)
    body = {"messages": [{"role": "user", "content": text}]} if "chat" in path else {"prompt": text}
    message = server.refused(path, **body)
    assert "length is 2048 tokens" in message and "at most 43008" in message and "raise max_model_len" in message


def test_a_body_that_is_right_goes_straight(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not FastAPI's way to a function; without a thread if it is short and has no grammar. Any other is FastAPI's."""
    ways, threads, app = [], [], server.http.app_server
    solve, form = routing.solve_dependencies, app.form
    monkeypatch.setattr(routing, "solve_dependencies", lambda **given: (ways.append(given["body"]), solve(**given))[1])
    name = lambda: threading.current_thread().name.partition("_")[0]  # noqa: E731
    monkeypatch.setattr(app, "form", lambda asked: (threads.append(name()), form(asked))[1])
    server.complete([5], max_tokens=1)
    server.complete([5], max_tokens=1, guided_regex="[ab]")
    server.complete([5] * 500, max_tokens=1)
    assert not ways and [name == "asyncio" for name in threads] == [False, True, True]
    assert "not 'x'" in server.refused("/v1/completions", stream="x") and ways == [{"stream": "x"}]
    typed = server.post("/v1/completions", content=b'{"prompt": [5]}', headers={"Content-Type": "a/json; charset=b"})
    assert typed.status_code == 415


def test_few_long_bodies_are_encoded_at_once(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of eight; a short one does not wait for them."""
    at_once, highest, lock, go_on = 0, 0, threading.Lock(), threading.Event()

    def encode(text: str, add_special_tokens: bool = True) -> list[int]:
        nonlocal at_once, highest
        if len(text) > 9:
            with lock:
                at_once += 1
                highest = max(highest, at_once)
            assert go_on.wait(60)
            with lock:
                at_once -= 1
        return [5]

    monkeypatch.setattr(server.http.app_server.llm, "encode_prompt", encode)
    with ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(server.complete, "a " * 2**17 + "b", max_tokens=1) for _ in range(8)]
        while at_once < 2:
            time.sleep(0.01)
        assert server.complete("a", max_tokens=1)
        go_on.set()
        assert all(answer.result() for answer in answers)
    assert highest == 2


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/v1/completions", {"stop": ["a"] * 513}, "stop has 513 entries, of at most 512"),
        ("/v1/completions", {"stop": "a" * 1025}, "stop has a text of 1025 characters, of at most 1024"),
        ("/v1/completions", {"logit_bias": {str(token): 1 for token in range(513)}}, "logit_bias has 513 entries"),
        ("/v1/completions", {"allowed_token_ids": [5] * 4097}, "allowed_token_ids has 4097 entries"),
        ("/v1/completions", {"prompt": ["a"] * 513}, "513 prompts, and a request has at most 512"),
        ("/v1/chat/completions", {"n": 513}, "n is 513, for each of 1 prompts, and a request has at most 512"),
        ("/v1/chat/completions", {"logprobs": True, "top_logprobs": 21}, "logprobs must be at most 20"),
        ("/v1/completions", {"cache_salt": "a" * 1025}, "cache_salt: "),
        ("/v1/chat/completions", {"messages": [{}] * 10001}, "messages: "),
        ("/detokenize", {"tokens": [5] * 2049}, "tokens has 2049 ids, max_model_len is 2048"),
    ],
)
def test_lists_of_a_request(server: Any, path: str, body: dict[str, Any], words: str) -> None:
    common = {"messages": [{"role": "user", "content": "a"}]} if "chat" in path else {"prompt": "a"}
    assert words in server.refused(path, **common | body)


def test_a_page_of_another_site(server: Any) -> None:
    """Its reader's browser sends no JSON without asking, no Host but the site's, and shows no page within its own."""
    body = json.dumps({"prompt": "a", "max_tokens": 1}).encode()
    for kind in ("text/plain", "application/x-www-form-urlencoded", None):
        response = server.post("/v1/completions", content=body, headers={} if kind is None else {"Content-Type": kind})
        assert response.status_code == 415 and "Content-Type: application/json" in response.json()["error"]["message"]
    for host in ("localhost", "127.0.0.1:1", "[::1]:8000", "LOCALHOST:8000"):
        assert server.post("/v1/completions", content=body, headers=JSON | {"Host": host}).status_code == 200
    for host in ("evil.example", "127.0.0.1.evil.example:8000", "localhost.evil.example"):
        for path in ("/v1/models", "/", "/page/page.js", "/metrics"):
            response = server.get(path, headers={"Host": host})
            assert response.status_code == 400 and repr(host) in response.json()["error"]["message"]
    for path in ("/", "/page/page.js"):
        assert server.get(path).headers["X-Frame-Options"] == "DENY"


def test_a_server_of_a_network_has_any_name() -> None:
    with bind("0.0.0.0", 0) as bound:
        assert hosts_of(bound, "0.0.0.0") == []
    with bind("127.0.0.1", 0) as bound:
        assert hosts_of(bound, "Box.local") == ["127.0.0.1", "[::1]", "box.local", "localhost"]


@pytest.mark.parametrize("first", [0, 1])
def test_two_lengths_of_a_body(server: Any, first: int) -> None:
    """A proxy in front may read one of them, and take the rest for another request."""
    lengths = ["Content-Length: 5", "Transfer-Encoding: chunked"]
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n{lengths[first]}\r\n{lengths[1 - first]}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port), 20) as connection:
        connection.sendall(head.encode() + b"0\r\n\r\n")
        assert connection.recv(100).startswith(b"HTTP/1.1 400 ")


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
        for path in ("/v1/models", "/metrics"):
            response = server.get(path, headers={key: value.encode() for key, value in given.items()})
            assert response.status_code == 401 and response.json()["error"]["code"] == "invalid_api_key"
    assert server.get("/v1/models", headers={"Authorization": "Bearer a secret"}).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", ["mine", None])
def test_an_abort(serve: Any, slow: LLM, name: str | None, stream: bool) -> None:
    """By name, or of all."""
    server = serve(slow)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(server.post, "/v1/completions", json=LONG | {"request_id": "mine", "stream": stream})
        while not slow.engine.scheduler.has_work:
            time.sleep(0.01)
        assert server.answer("/abort_requests", request_ids=["other"]) == {"aborted": 0}
        assert server.answer("/abort_requests", **({"request_ids": [name]} if name else {})) == {"aborted": 1}
        answer = running.result()
    assert answer.status_code == (200 if stream else 499) and '"code":"aborted"' in answer.text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("timeout", "signals"), [(20.0, 1), (0.2, 1), (20.0, 2)])
def test_the_end(
    serve: Any, slow: LLM, timeout: float, signals: int, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """What runs ends, or is ended with an error after the timeout or a second signal, as is a request that is half
    sent; no client can connect any longer."""
    server = serve(slow, shutdown_timeout=timeout)

    def answer() -> str:
        return server.post("/v1/completions", json=LONG | {"max_tokens": 60, "stream": stream}).text

    with ThreadPoolExecutor(1) as pool, socket.create_connection(("127.0.0.1", server.port), 20) as half:
        if timeout < 1:
            half.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{")
        running = pool.submit(answer)
        while not slow.engine.scheduler.has_work:
            time.sleep(0.01)
        for _ in range(signals):
            server.http.handle_exit(signal.SIGINT, None)
        await_end(server)
        whole = running.result()
        assert half.recv(99)[:12] == (b"" if timeout > 1 else b"HTTP/1.1 503")
    finished = timeout > 1 and signals == 1
    assert ('"finish_reason":"length"' in whole, '"code":"shutdown"' in whole) == (finished, not finished)
    assert whole.endswith("data: [DONE]\n\n") == stream
    assert not [record for record in caplog.records if record.exc_info]


def await_end(server: Any) -> None:
    until = time.monotonic() + 10
    with pytest.raises(httpx.TransportError):
        while time.monotonic() < until:
            httpx.get(f"{server.base_url}/ready", trust_env=False)
            time.sleep(0.02)


def test_an_engine_that_ends(serve: Any, tiny_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its requests get the error, liveness fails, the server ends and says so."""
    llm = tiny_llm(600)
    server = serve(llm)

    def broken() -> None:
        raise RuntimeError("the device is lost")

    monkeypatch.setattr(llm.engine.scheduler, "schedule", broken)
    response = server.post("/v1/completions", json=LONG)
    assert response.status_code >= 500 and "the device is lost" in response.json()["error"]["message"]
    await_end(server)
    assert server.http.failed
    with pytest.raises(RuntimeError):
        llm.close()
        llm.generate([[5]])


def test_requests_that_are_half_sent(serve: Any, slow: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """They have a limit of time, as has a connection without any; an answer may take longer."""
    monkeypatch.setattr(http, "_SILENT_S", 1.0)
    server = serve(slow)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with ExitStack() as stack:
        halves = [stack.enter_context(socket.create_connection(("127.0.0.1", server.port), 20)) for _ in range(4)]
        for half, sent in zip(halves, (b"", b"POST", head, head + b'Content-Length: 99\r\n\r\n{"prompt"')):
            half.sendall(sent)
        assert [half.recv(99) for half in halves] == [b""] * 4
        assert server.complete(**LONG)


def test_a_request_that_never_ends(serve: Any, tiny: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A byte now and then holds no connection."""
    monkeypatch.setattr(http, "_WHOLE_S", 0.4)
    server = serve(tiny)
    with socket.create_connection(("127.0.0.1", server.port), 0.05) as half, suppress(ConnectionError):
        half.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: ")
        for _ in range(200):
            half.sendall(b"A")
            with suppress(TimeoutError):
                assert half.recv(99) == b""
                return
        pytest.fail("it is still open")


def test_streams_of_http_1_0(server: Any) -> None:
    """Its clients know no chunks: the end of a stream is that of the connection."""
    for stream in (True, False):
        body = json.dumps({"prompt": "a", "max_tokens": 3, "stream": stream}).encode()
        head = f"POST /v1/completions HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        with socket.create_connection(("127.0.0.1", server.port), 20) as connection:
            connection.sendall(head.encode() + body)
            answer = b"".join(iter(lambda: connection.recv(2**16), b""))
        head_of_answer, _, rest = answer.partition(b"\r\n\r\n")
        assert head_of_answer.startswith(b"HTTP/1.1 200 ") and b"chunked" not in head_of_answer
        events = rest.removesuffix(b"\n\n").split(b"\n\n")
        assert all(event.startswith(b"data: ") for event in events) == stream
        assert events[-1] == b"data: [DONE]" if stream else json.loads(rest)["choices"]


def test_what_there_is_not(serve: Any, tiny: LLM) -> None:
    server = serve(tiny)
    assert server.put("/v1/models").json()["error"]["message"] == "/v1/models does not take PUT"
    for path in ("/v1/embeddings", "/v1/audio/speech", "/%ff%fe", "/v1/../../etc/passwd"):
        assert server.post(path, json={}).json()["error"]["type"] == "not_found_error"
    assert "not valid JSON" in server.post("/v1/completions", content=b"{", headers=JSON).json()["error"]["message"]
    for body in (b"\xff", b"[" * 100_000, b"[]", b'{"prompt": "a", "n": ' + b"9" * 5000 + b"}"):
        assert server.post("/v1/completions", content=body, headers=JSON).status_code == 400, body[:20]
