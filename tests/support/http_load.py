"""Clients of a server, good and bad ones: ``http_load.py PORT CLIENTS REQUESTS SEED KINDS.json`` prints what became of
their requests, as JSON.

Plain sockets, so that a request can be cut anywhere. KINDS.json has requests and the tokens that they must get.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

TIMEOUT_S = 120.0
_HUGE: list[Any] = [10**400, -(10**25), 1e308, 2**63, 2**31]
_TYPES: list[Any] = ["x", [], {}, True, [[]], {"a": [{}]}, "", -1, 0.5, [None], "\ud800", *_HUGE]


def post(body: bytes, length: int | None = None, path: str = "/v1/completions") -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {length or len(body)}\r\n\r\n"
    return head.encode() + body


def malformed(kind: dict[str, Any], rng: random.Random) -> bytes:
    """The bytes of a request that is wrong, or not quite what it was."""
    body = {"prompt": kind["prompt"], **kind["params"]}
    text = json.dumps(body).encode()
    how = rng.randrange(9)
    if how == 0:  # other bytes in the JSON
        raw = bytearray(text)
        for _ in range(rng.randrange(1, 6)):
            raw[rng.randrange(len(raw))] = rng.randrange(256)
        return post(bytes(raw))
    if how == 1:
        return post(text[: rng.randrange(1, len(text))])
    if how in (2, 3):  # wrong types, numbers of any size
        body[rng.choice([*body, "n", "logprobs", "stop", "logit_bias", "model", "cache_salt"])] = rng.choice(_TYPES)
        return post(json.dumps(body).encode(), path=rng.choice(["/v1/completions", "/v1/chat/completions"]))
    if how == 4:
        depth = rng.choice([70, 1000, 100_000])
        return post(b'{"prompt": ' + b"[" * depth + b"]" * rng.choice([0, depth]) + b"}")
    if how == 5:
        return post(b'{"prompt": "' + bytes(rng.randrange(128, 256) for _ in range(9)) + b'"}')
    if how == 6:
        return post(b'{"prompt": [5], "temperature": ' + rng.choice([b"1e999", b"NaN", b"9" * 9000, b"--1"]) + b"}")
    if how == 7:  # no HTTP, or not this route's
        return rng.choice(
            [b"\x00\xff\r\n\r\n", b"GET /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"]
        )
    return post(b"{" + b'"a":{},' * 500 + b'"b":' + rng.choice([b"null", b"[1,2"]) + b"}")


class Clients:
    """Sends requests.

    Attributes:
        seen: how many requests of each sort had which end.
        wrong: descriptions of answers that are not what they should be.
    """

    def __init__(self, port: int, kinds: list[dict[str, Any]], seed: int):
        self._port, self._kinds, self._rng = port, kinds, random.Random(seed)
        self.seen: Counter[str] = Counter()
        self.wrong: list[str] = []

    async def run(self, clients: int, requests: int) -> None:
        remaining = iter(range(requests))

        async def one() -> None:
            for _ in remaining:
                await asyncio.wait_for(self._request(), TIMEOUT_S)

        await asyncio.gather(*[one() for _ in range(clients)])

    async def _request(self) -> None:
        rng = self._rng
        kind, sort = rng.choice(self._kinds), rng.choice(["whole", "stream", "stream", "malformed", "leaves", "slow"])
        stream = sort == "stream" or (sort != "whole" and rng.random() < 0.5)
        body = {"prompt": kind["prompt"], "stream": stream, "return_token_ids": True, **kind["params"]}
        raw = malformed(kind, rng) if sort == "malformed" else post(json.dumps(body).encode())
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            if sort == "slow":
                await self._drip(writer, raw)
            else:
                writer.write(raw)
            if sort == "leaves":
                await self._leave(reader, rng)
                self.seen["left"] += 1
                return
            answer = await reader.read(-1)
        except ConnectionError:
            if sort != "malformed":
                raise
            answer = b""
        finally:
            writer.close()
        self._check(sort, stream, kind, answer)

    async def _drip(self, writer: asyncio.StreamWriter, raw: bytes) -> None:
        for first in range(0, len(raw), 60):
            writer.write(raw[first : first + 60])
            await asyncio.sleep(0.01)

    async def _leave(self, reader: asyncio.StreamReader, rng: random.Random) -> None:
        """Waits for some time, or some bytes, before the connection is closed."""
        with suppress(asyncio.TimeoutError, asyncio.IncompleteReadError, ConnectionError):
            await asyncio.wait_for(reader.readexactly(rng.choice([1, 300, 1500])), rng.random() * 0.1)

    def _check(self, sort: str, stream: bool, kind: dict[str, Any], answer: bytes) -> None:
        head, _, body = answer.partition(b"\r\n\r\n")
        status = head.split(b" ")[1].decode() if head else "closed"
        self.seen[f"{sort} {status}"] += 1
        if sort == "malformed":
            no_http = body == b"Invalid HTTP request received."  # uvicorn's words
            if status not in ("200", "400", "404", "405") or (
                status != "200" and b'"error"' not in body and not no_http
            ):
                self.wrong.append(f"{sort}: {answer[:300]!r}")
            return
        tokens = None
        if status == "200" and stream:
            tokens = [token for choice in _events(body) for token in choice["token_ids"]]
        elif status == "200":
            tokens = json.loads(body)["choices"][0]["token_ids"]
        if tokens != kind["tokens"]:
            self.wrong.append(f"{sort}, stream {stream}: {tokens} for {kind['tokens']}: {answer[:300]!r}")


def _events(body: bytes) -> list[dict[str, Any]]:
    """The choices in the events of a stream with chunked transfer encoding."""
    text = bytearray()
    while body:
        size, _, body = body.partition(b"\r\n")
        text += body[: int(size, 16)]
        body = body[int(size, 16) + 2 :]
    lines = [line for line in text.decode().split("\n\n") if line]
    if lines[-1] != "data: [DONE]":
        return []
    return [choice for line in lines[:-1] for choice in json.loads(line[6:])["choices"]]


def load(port: int, clients: int, requests: int, seed: int, kinds: list[dict[str, Any]]) -> dict[str, Any]:
    """Runs the clients; returns counts by sort and end, and the first wrong answers."""
    made = Clients(port, kinds, seed)
    asyncio.run(made.run(clients, requests))
    return {"seen": dict(sorted(made.seen.items())), "wrong": made.wrong[:5]}


if __name__ == "__main__":
    port, clients, requests, seed = map(int, sys.argv[1:5])
    print(json.dumps(load(port, clients, requests, seed, json.loads(Path(sys.argv[5]).read_text()))))
