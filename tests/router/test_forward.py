"""Requests through the router: passed on as they are, where to, retried or not, ended with their clients."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from dsa_engine.router.rule import Prompt
from dsa_engine.server.errors import ApiError

TEXT = "All work and no play makes Jack a dull boy. " * 50
Run = Callable[..., None]


def by(response: httpx.Response) -> int:
    """The replica that has answered."""
    assert response.status_code == 200, response.text
    return int(response.json()["by"])


def test_requests_and_answers_pass_unchanged(with_fleet: Run) -> None:
    async def test(fleet: Any) -> None:
        raw = b' {"prompt":  "caf\xc3\xa9", "n":1e0, "unknown": [null]}'
        headers = {"Authorization": "Bearer secret", "X-Request-Id": "7", "Connection": "x-hop, close", "X-Hop": "1"}
        answer = await fleet.client.post("/v1/completions?a=%20b&c", content=raw, headers=headers)
        ((target, got, body),) = fleet.replicas[0].requests
        assert (target, body) == ("/v1/completions?a=%20b&c", raw)
        assert got["authorization"] == "Bearer secret" and got["x-request-id"] == "7" and "x-hop" not in got
        assert got["host"] == fleet.servers[0].url.removeprefix("http://")
        assert answer.content == b'{"by": "0"}' and answer.headers["x-from"] == "the replica"
        assert "keep-alive" not in answer.headers and answer.headers["content-type"] == "application/json"

    with_fleet(test, 1)


def test_other_paths(with_fleet: Run) -> None:
    async def test(fleet: Any) -> None:
        for path in ("/v1/models", "/v1/models/a/b", "/version", "/"):
            assert (await fleet.client.get(path)).status_code == 200
        for path in ("/tokenize", "/detokenize", "/v1/chat/completions"):
            assert (await fleet.client.post(path, json={"messages": []})).status_code == 200
        assert [target for target, _, _ in fleet.replicas[0].requests][:2] == ["/v1/models", "/v1/models/a/b"]
        count = len(fleet.replicas[0].requests)
        for path in ("/v1/embeddings", "/v1/models/%2e%2e/x", "/docs"):
            answer = await fleet.client.get(path)
            assert answer.status_code == 404 and "there is nothing" in answer.json()["error"]["message"], path
        assert len(fleet.replicas[0].requests) == count

    with_fleet(test, 1)


def test_a_prefix_is_followed_and_its_replica_left_when_loaded(with_fleet: Run) -> None:
    async def test(fleet: Any) -> None:
        first = by(await fleet.complete(TEXT))
        second = by(await fleet.complete("Another text. " * 200))
        assert first != second
        for number in range(3):
            assert by(await fleet.complete(f"{TEXT} {number}")) == first
        chat = [{"role": "user", "content": TEXT}]
        where = by(await fleet.client.post("/v1/chat/completions", json={"messages": chat}))
        chat += [{"role": "assistant", "content": "So."}, {"role": "user", "content": "Go on."}]
        assert by(await fleet.client.post("/v1/chat/completions", json={"messages": chat})) == where
        busy = fleet.router.rule.send(Prompt(5000), first)
        assert by(await fleet.complete(f"{TEXT} again")) == second
        fleet.router.rule.end(busy)

    with_fleet(test)


@pytest.mark.parametrize("status", [429, 502, 503])
def test_a_refusal_of_one_replica_goes_to_another(with_fleet: Run, status: int) -> None:
    async def test(fleet: Any) -> None:
        fleet.replicas[0].status = status
        assert by(await fleet.complete(TEXT)) == 1
        assert by(await fleet.complete(TEXT)) == 1  # what was refused is not counted as cached there
        assert len(fleet.replicas[0].requests) == 1
        for replica in fleet.replicas:
            replica.status = status
        refused = await fleet.complete("another")
        assert refused.status_code == status and refused.content in (b'{"by": "0"}', b'{"by": "1"}')
        assert status == 502 or refused.headers["retry-after"] == "7"
        text = (await fleet.client.get("/metrics")).text
        assert (
            f'dsa_engine_router_failed_attempts_total{{reason="{status}",replica="{fleet.servers[0].url}"}} 2.0' in text
        )

    with_fleet(test)


def test_other_errors_are_passed_on(with_fleet: Run) -> None:
    async def test(fleet: Any) -> None:
        for count, status in enumerate((400, 404, 500, 504), start=1):
            for replica in fleet.replicas:
                replica.status = status
            assert (await fleet.complete()).status_code == status
            assert sum(len(replica.requests) for replica in fleet.replicas) == count

    with_fleet(test)


def test_a_broken_connection_is_tried_once_more(with_fleet: Run) -> None:
    """A request that ends every replica that gets it must not get all of them."""

    async def test(fleet: Any) -> None:
        fleet.replicas[0].breaks_after = 0
        assert by(await fleet.complete()) != 0
        for replica in fleet.replicas:
            replica.breaks_after = 0
            replica.requests.clear()
        answer = await fleet.complete()
        assert answer.status_code == 502 and answer.json()["error"]["code"] == "broken"
        assert sum(len(replica.requests) for replica in fleet.replicas) == 2

    with_fleet(test, 4)


EVENTS = [b'data: {"a": 1}\n\n', b'data: {"a": 2}\n\n', b"data: [DONE]\n\n"]


def test_a_stream_comes_part_by_part(with_fleet: Run) -> None:
    async def test(fleet: Any) -> None:
        fleet.replicas[0].streams(*EVENTS)
        gate = fleet.replicas[0].gate_later = asyncio.Event()
        async with fleet.client.stream("POST", "/v1/completions", json={"prompt": TEXT, "stream": True}) as response:
            parts = response.aiter_raw()
            assert await anext(parts) == EVENTS[0]
            assert fleet.router.rule.waiting_tokens(0) < 200  # it decodes
            gate.set()
            assert b"".join([part async for part in parts]) == EVENTS[1] + EVENTS[2]

    with_fleet(test, 1)


@pytest.mark.parametrize("cut", [False, True])
def test_nothing_is_retried_after_the_first_byte(with_fleet: Run, cut: bool) -> None:
    """A stream ends with an error event; if the last event is not whole, the connection is closed."""

    async def test(fleet: Any) -> None:
        for replica in fleet.replicas:
            replica.streams(EVENTS[0][:5] if cut else EVENTS[0], EVENTS[1])
            replica.breaks_after = 1
        got = b""
        try:
            async with fleet.client.stream("POST", "/v1/completions", json={"prompt": "a", "stream": True}) as response:
                async for part in response.aiter_raw():
                    got += part
            assert not cut
            event = got.removeprefix(EVENTS[0])
            assert json.loads(event.removeprefix(b"data: "))["error"]["code"] == "broken" and event.endswith(b"\n\n")
        except httpx.RemoteProtocolError:
            assert cut and got == EVENTS[0][:5]
        assert sum(len(replica.requests) for replica in fleet.replicas) == 1

    with_fleet(test)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_its_request(with_fleet: Run, stream: bool) -> None:
    async def test(fleet: Any) -> None:
        (replica,) = fleet.replicas
        replica.streams(*EVENTS)
        replica.gate_later = asyncio.Event()
        if not stream:
            replica.gate = asyncio.Event()
        asking = asyncio.ensure_future(fleet.complete(TEXT, stream=stream))
        await fleet.until(lambda: replica.requests)
        assert fleet.router.rule.requests(0) == 1
        asking.cancel()
        await asyncio.wait_for(replica.gone.wait(), 10)
        await fleet.until(lambda: not fleet.router.rule.requests(0) and fleet.router.admission.empty)

    with_fleet(test, 1)


def test_a_request_that_takes_too_long_is_ended(with_fleet: Run) -> None:
    async def test(fleet: Any) -> None:
        (replica,) = fleet.replicas
        replica.gate = asyncio.Event()
        answer = await fleet.complete()
        assert answer.status_code == 504 and "0.2 seconds" in answer.json()["error"]["message"]
        await asyncio.wait_for(replica.gone.wait(), 10)

    with_fleet(test, 1, request_timeout=0.2)


def test_a_stream_that_is_stopped_ends_with_an_error(with_fleet: Run) -> None:
    """By the limit of time, or the end of the router."""

    async def test(fleet: Any) -> None:
        (replica,) = fleet.replicas
        replica.streams(*EVENTS)
        replica.gate_later = asyncio.Event()
        async with fleet.client.stream("POST", "/v1/completions", json={"prompt": TEXT, "stream": True}) as response:
            parts = response.aiter_raw()
            assert await anext(parts) == EVENTS[0]
            fleet.router.admission.stop_all(ApiError(503, "no more"))
            last = b"".join([part async for part in parts])
        assert json.loads(last.removeprefix(b"data: "))["error"]["message"] == "no more"
        await asyncio.wait_for(replica.gone.wait(), 10)

    with_fleet(test, 1)


NO_SENSE = [
    (b"", 400),
    (b"not json", 400),
    (b'{"prompt": "\xff"}', 400),
    (b"[1]", 400),
    (b'{"prompt": NaN}', 400),
    (b'{"prompt": ' + b"[" * 100_000, 400),
    (b'{"prompt": ' + b"[" * 100 + b"]" * 100 + b"}", 400),
    (b'{"n": ' + b"9" * 10_000 + b"}", 400),
    (b'{"prompt": "' + b"a" * 200_000 + b'"}', 413),
    (b'{"prompt": {"a": 5}, "n": 1e999, "messages": 7}', 200),  # the replica says what is wrong
    (b'{"messages": [[], null, "\\ud800"], "model": []}', 200),
]


def test_bodies_that_make_no_sense(with_fleet: Run) -> None:
    async def test(fleet: Any) -> None:
        for raw, status in NO_SENSE:
            fleet.replicas[0].requests.clear()
            answer = await fleet.client.post("/v1/completions", content=raw)
            assert answer.status_code == status, (raw[:30], answer.text)
            assert len(fleet.replicas[0].requests) == (status == 200)
            assert status == 200 or answer.json()["error"]["message"]

    with_fleet(test, 1, max_body_size=150_000)


def test_a_path_that_is_too_long(with_fleet: Run) -> None:
    async def test(fleet: Any) -> None:
        fleet.router.replicas.all[0].url += "/" + "a" * 65_000
        answer = await fleet.client.get("/v1/models/" + "b" * 1000)
        assert answer.status_code == 400 and "cannot be passed on" in answer.json()["error"]["message"]

    with_fleet(test, 1)


def test_a_slow_body_and_too_many_requests(with_fleet: Run) -> None:
    async def test(fleet: Any) -> None:
        async def slow() -> Any:
            yield b"{"
            await asyncio.sleep(0.5)
            yield b"}"

        answer = await fleet.client.post("/v1/completions", content=slow())
        assert answer.status_code == 408 and "0.1 seconds" in answer.json()["error"]["message"]
        gate = fleet.replicas[0].gate = asyncio.Event()
        running = asyncio.ensure_future(fleet.complete())
        await fleet.until(lambda: fleet.replicas[0].requests)
        refused = await fleet.complete()
        assert refused.status_code == 429 and refused.headers["retry-after"]
        gate.set()
        await running

    with_fleet(test, 1, body_timeout=0.1, max_concurrent_requests=1)
