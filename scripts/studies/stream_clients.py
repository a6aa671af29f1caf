"""Clients of measure_server.py, in a process of their own: each line "whole" or "stream" on standard input sends the
requests at once, and prints how long all answers took.

stream_clients.py HOST PORT OUTPUT_LEN OUTPUT_LEN …
"""

from __future__ import annotations

import asyncio
import json
import sys
import time


def prompt(number: int) -> list[int]:
    return [5 + number % 200, 6, 7, 8]


async def request(host: str, port: int, number: int, output_len: int, stream: bool) -> bytes:
    """One request over a plain socket; returns the bytes of the answer."""
    body = {"prompt": prompt(number), "max_tokens": output_len, "ignore_eos": True, "temperature": 0, "stream": stream}
    text = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: {len(text)}\r\n\r\n"
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(head.encode() + text)
    answer = await reader.read(-1)
    writer.close()
    return answer


async def all_requests(host: str, port: int, lengths: list[int], stream: bool) -> None:
    answers = await asyncio.gather(*[request(host, port, i, length, stream) for i, length in enumerate(lengths)])
    wrong = [one for one in answers if not one.startswith(b"HTTP/1.1 200") or b'"error"' in one]
    if wrong:
        raise SystemExit(f"a request failed: {wrong[0][:400]!r}")


def main() -> None:
    host = sys.argv[1]
    port, *lengths = map(int, sys.argv[2:])
    for line in sys.stdin:
        begun = time.perf_counter()
        asyncio.run(all_requests(host, port, lengths, line.strip() == "stream"))
        print(time.perf_counter() - begun, flush=True)


if __name__ == "__main__":
    main()
