"""Health of replicas and of the router: death and return, draining, the end, keys, metrics, options."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from dsa_engine.cli import main
from dsa_engine.router.options import RouterOptions
from dsa_engine.router.run import HttpServer
from dsa_engine.server.listen import bind

TEXT = "All work and no play makes Jack a dull boy. " * 50
Run = Callable[..., None]


def states(fleet: Any) -> list[str]:
    return [replica.state for replica in fleet.router.replicas.all]


def test_death_and_return(with_fleet: Run) -> None:
    async def test(fleet: Any) -> None:
        assert (await fleet.complete(TEXT)).json()["by"] == "0"
        await fleet.servers[0].stop()
        assert (await fleet.complete(TEXT)).json()["by"] == "1"  # the connection is refused
        assert states(fleet) == ["dead", "ready"]
        await fleet.servers[1].stop()
        answer = await fleet.complete(TEXT)
        assert answer.status_code == 503 and answer.headers["retry-after"]
        message = answer.json()["error"]["message"]
        assert all(f"{server.url} is dead" in message for server in fleet.servers)
        assert (await fleet.client.get("/ready")).status_code == 503
        assert (await fleet.client.get("/health")).status_code == 200
        await fleet.servers[0].start()
        await fleet.until(lambda: states(fleet) == ["ready", "dead"])  # by the checks, on their own
        assert (await fleet.complete(TEXT)).json()["by"] == "0"
        assert (await fleet.client.get("/ready")).status_code == 200

    with_fleet(test, health_check_interval=0.05)


def test_a_cache_is_lost_with_its_process(with_fleet: Run) -> None:
    async def test(fleet: Any) -> None:
        assert (await fleet.complete(TEXT)).json()["by"] == "0"
        await fleet.servers[0].stop()
        await fleet.check()
        assert (await fleet.complete(TEXT)).json()["by"] == "1"
        await fleet.servers[0].start()
        await fleet.check()
        assert (await fleet.complete(TEXT)).json()["by"] == "1"

    with_fleet(test)


@pytest.mark.parametrize("has_ready", [True, False])
def test_a_replica_that_is_not_ready_gets_nothing(with_fleet: Run, has_ready: bool) -> None:
    """It ends what it has, and keeps its cache. Servers without /ready are asked /health."""

    async def test(fleet: Any) -> None:
        for replica in fleet.replicas:
            replica.has_ready = has_ready
        await fleet.check()
        assert (await fleet.complete(TEXT)).json()["by"] == "0"
        gate = fleet.replicas[0].gate = asyncio.Event()
        running = asyncio.ensure_future(fleet.complete(TEXT))
        await fleet.until(lambda: len(fleet.replicas[0].requests) == 2)
        fleet.replicas[0].readiness = 503
        await fleet.check()
        assert states(fleet) == ["not ready", "ready"]
        assert (await fleet.complete(TEXT)).json()["by"] == "1"
        gate.set()
        assert (await running).json()["by"] == "0"
        fleet.replicas[0].readiness = 200
        await fleet.check()
        assert (await fleet.complete(TEXT)).json()["by"] == "0"

    with_fleet(test)


def test_a_replica_that_hangs_counts_as_dead_after_three_checks(with_fleet: Run) -> None:
    async def test(fleet: Any) -> None:
        async def hangs(*_: Any) -> None:
            raise asyncio.TimeoutError

        fleet.router.replicas._status = hangs
        for expected in ("ready", "ready", "dead"):
            await fleet.check()
            assert states(fleet) == [expected]

    with_fleet(test, 1)


def test_draining_by_a_call(with_fleet: Run) -> None:
    async def test(fleet: Any) -> None:
        put = await fleet.client.put("/workers/0", json={"draining": True})
        assert put.json() | {"url": ""} == {
            "id": 0, "url": "", "state": "ready", "draining": True, "requests": 0, "waiting_tokens": 0
        }  # fmt: skip
        await fleet.check()
        assert {(await fleet.complete(str(number))).json()["by"] for number in range(4)} == {"1"}
        await fleet.client.put("/workers/1", json={"draining": True})
        answer = await fleet.complete()
        assert answer.status_code == 503 and f"{fleet.servers[0].url} is draining" in answer.json()["error"]["message"]
        await fleet.client.put("/workers/0", json={"draining": False})
        assert (await fleet.complete()).json()["by"] == "0"
        listed = (await fleet.client.get("/workers")).json()["workers"]
        assert [one["draining"] for one in listed] == [False, True]
        for path, body, status in (("2", {"draining": True}, 404), ("x", {}, 404), ("0", {"draining": 1}, 400)):
            assert (await fleet.client.put(f"/workers/{path}", json=body)).status_code == status

    with_fleet(test)


def test_workers_are_for_this_machine_only(with_fleet: Run) -> None:
    async def test(fleet: Any) -> None:
        from dsa_engine.router.app import make_app

        for address, status in (("10.0.0.1", 403), ("127.0.0.9", 200), ("::1", 200), ("testclient", 403)):
            transport = httpx.ASGITransport(make_app(fleet.router), client=(address, 1))
            async with httpx.AsyncClient(transport=transport, base_url="http://router") as client:
                assert (await client.get("/workers")).status_code == status, address

    with_fleet(test, 1)


def test_the_key(with_fleet: Run) -> None:
    async def test(fleet: Any) -> None:
        assert (await fleet.complete()).status_code == 401
        fleet.client.headers["Authorization"] = "Bearer right"
        assert (await fleet.complete()).status_code == 200
        assert fleet.replicas[0].requests[0][1]["authorization"] == "Bearer right"

    with_fleet(test, 1, api_key="right")


def test_metrics(with_fleet: Run) -> None:
    async def test(fleet: Any) -> None:
        for _ in range(2):
            await fleet.complete(TEXT)
        text = (await fleet.client.get("/metrics")).text
        url = f'replica="{fleet.servers[0].url}"'
        for line in (
            f'responses_total{{{url},status="200"}} 2.0',
            f"prompt_tokens_total{{{url}}} 1100.0",
            f"hit_tokens_total{{{url}}} 512.0",
            f"replica_ready{{{url}}} 1.0",
            f"waiting_tokens{{{url}}} 0.0",
            f"time_to_first_byte_seconds_count{{{url}}} 2.0",
        ):
            assert f"dsa_engine_router_{line}" in text, line

    with_fleet(test, 1)


def test_sigterm_lets_requests_end(with_fleet: Run) -> None:
    """New ones get 503, and so does /ready; a second signal ends what runs, with an error. A connection without a
    header is closed all the while."""

    async def test(fleet: Any) -> None:
        urls = [one.url for one in fleet.servers]
        bound = bind("127.0.0.1", 0)
        server = HttpServer(RouterOptions(replica=urls, shutdown_timeout=30, body_timeout=0.3), bound)
        serving = asyncio.ensure_future(server._serve([bound]))
        await fleet.until(lambda: server.started)
        port = bound.getsockname()[1]
        async with httpx.AsyncClient(base_url=server.url, trust_env=False, timeout=30) as client:
            gate = fleet.replicas[0].gate = asyncio.Event()
            fleet.replicas[1].gate = asyncio.Event()
            asked = [asyncio.ensure_future(client.post("/v1/completions", json={"prompt": [n]})) for n in (1, 2)]
            await fleet.until(lambda: all(replica.requests for replica in fleet.replicas))
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nX-Slow: ")
            assert await reader.read() == b""  # closed, as no header came in time
            writer.close()
            server.handle_exit(15, None)
            await fleet.until(lambda: server._router.admission.draining)
            assert (await client.get("/ready")).status_code == 503
            assert (await client.post("/v1/completions", json={})).status_code == 503
            gate.set()
            done, (last,) = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
            assert [answer.result().status_code for answer in done] == [200]
            server.handle_exit(15, None)  # a second signal
            assert (await last).status_code == 503
        await asyncio.wait_for(serving, 10)

    with_fleet(test)


@pytest.mark.parametrize(
    ("urls", "complaint"),
    [
        (["10.0.0.1:8000"], "does not begin with http"),
        (["ftp://a"], "does not begin with http"),
        (["http://"], "names no host"),
        (["http://a b"], "names no host"),
        (["http://a:99999"], "is no URL"),
        (["http://[::1"], "is no URL"),
        (["http://a?b=c"], "a query"),
        (["http://user:word@a"], "has a user"),
        (["http://a:8000/v1/"], "ends with /v1"),
        (["http://a", "http://a/"], "given twice"),
    ],
)
def test_bad_urls(urls: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["route", "--replica", *urls])
    error = capsys.readouterr().err
    assert error.startswith("error: --replica ") and complaint in error


def test_an_address_in_use(capsys: pytest.CaptureFixture[str]) -> None:
    with bind("127.0.0.1", 0) as bound, pytest.raises(SystemExit, match="2"):
        bound.listen()
        main(["route", "--replica", "http://127.0.0.1:1", "--port", str(bound.getsockname()[1])])
    assert "cannot listen at 127.0.0.1" in capsys.readouterr().err


def test_a_replica_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["route"])
    assert "--replica" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["route", "--worker-urls", "http://a", "b"])  # its name in other routers
    assert "--replica 'b' does not begin" in capsys.readouterr().err
    with pytest.raises(ValueError, match="at least one server"):
        RouterOptions(replica=[])
