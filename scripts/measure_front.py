"""Tokens a second of the processes that speak HTTP, with an engine that costs nothing.

The engine is a thread that answers over the channel of a real one; its tokens come from a table. Clients, in a process
of their own, send a request as soon as the answer to the last one is complete. Each load runs with one process, with
two and so on. As clients and engine take processor time too, the column that holds on any machine is tokens per second
of processor time of the processes that speak HTTP; with idle cores, each of them reaches it.

Example:
    python scripts/measure_front.py --clients 256 --api-server-count 1 2
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import threading
import time
from tempfile import TemporaryDirectory
from typing import Any
from urllib.request import urlopen

import torch
import zmq

from dsa_engine.arguments import add_json_argument, argument_parser, run
from dsa_engine.config.model import ModelConfig
from dsa_engine.engine.reply import RequestRecord
from dsa_engine.engine.requests.capacity import Capacity
from dsa_engine.engine.requests.request import Ending, SampledToken
from dsa_engine.measure.report import environment, format_table, write_json
from dsa_engine.model_folder import resolve_model
from dsa_engine.server.http import bind, url_of
from dsa_engine.server.messages import EngineFacts, NewRequest, NewTokens, encode, to_engine
from dsa_engine.server.options import ServerOptions
from dsa_engine.server.process import HttpProcesses
from dsa_engine.system.output_files import check_outputs
from dsa_engine.text.tokenizer import Tokenizer

LOADS: dict[str, dict[str, Any]] = {
    "events": {"stream": True},
    "whole": {},
    "whole, stop strings": {"stop": ["never", "seen"]},
}
_TICKS = os.sysconf("SC_CLK_TCK")


def parse() -> argparse.Namespace:
    parser = argument_parser(__doc__)
    parser.add_argument("--model", default="demo", help="as of LLM; only its configuration and tokenizer are read")
    parser.add_argument("--clients", type=int, default=256, help="requests that run at once")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of an answer")
    parser.add_argument("--seconds", type=float, default=5.0, help="time of a measurement, after a second of warm-up")
    parser.add_argument("--api-server-count", type=int, nargs="+", default=[1, 2], help="processes that speak HTTP")
    parser.add_argument("--load", nargs="+", choices=LOADS, default=list(LOADS), help="an event a token, or answers")
    parser.add_argument("--chat", action="store_true", help="ask /v1/chat/completions instead of /v1/completions")
    add_json_argument(parser)
    args = parser.parse_args()
    if min(args.clients, args.tokens, args.seconds, *args.api_server_count) < 1:
        raise ValueError("--clients, --tokens, --seconds and --api-server-count must be at least 1")
    return args


class Engine:
    """Answers one process that speaks HTTP, in place of :class:`dsa_engine.server.process.Relay`.

    A step gives each request a token. Steps follow each other at once, but no more than ``lead`` tokens are on their
    way: an engine that runs ahead would let the other process work off long queues, which no real one does.

    Args:
        received: tokens that the clients have received.
        made: tokens that all engines have made.

    Attributes:
        requests: number of requests that have come.
    """

    def __init__(self, facts: EngineFacts, table: list[int], lead: int, received: Any, made: list[int]):
        self.facts, self._table, self._lead, self._received, self._made = facts, table, lead, received, made
        self.requests = 0
        self._folder = TemporaryDirectory(prefix="dsa_engine-")
        self.folder = self._folder.name
        self._context = zmq.Context()
        self._closed = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        tokens, requests = self._context.socket(zmq.PUSH), self._context.socket(zmq.PULL)
        tokens.set_hwm(0)
        requests.bind(f"ipc://{self.folder}/requests")
        tokens.connect(f"ipc://{self.folder}/tokens")
        remaining: dict[int, int] = {}  # tokens, by request
        while not self._closed:
            ahead = self._made[0] - self._received.value > self._lead
            while requests.poll(1 if ahead or not remaining else 0):
                new = [one for one in to_engine(requests.recv()) if isinstance(one, NewRequest)]
                remaining |= {one.id: one.params["max_tokens"] for one in new}
                self.requests += len(new)
            if ahead or not remaining:
                continue
            step = []
            for number, left in remaining.items():
                sampled = [SampledToken(self._table[(number + left) % len(self._table)])]
                step.append(NewTokens(number, sampled, *((None, None) if left > 1 else _END)))
            tokens.send(encode(step))
            self._made[0] += len(step)
            remaining = {number: left - 1 for number, left in remaining.items() if left > 1}
        tokens.close(linger=0)
        requests.close(linger=0)

    def close(self) -> None:
        self._closed = True
        self._thread.join()
        self._context.term()
        self._folder.cleanup()


_END = Ending("length"), RequestRecord()


class Client(asyncio.Protocol):
    """Sends the same request again and again over one connection, and counts the tokens that come.

    Args:
        mark: is once in each event with text; None: the answer is one piece.
    """

    def __init__(self, request: bytes, tokens: int, mark: bytes | None, received: Any):
        self._request, self._tokens, self._mark, self._received = request, tokens, mark, received

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        if self._mark is not None:
            self._received.value += data.count(self._mark)
        elif data.endswith(b"}"):
            self._received.value += self._tokens
        if data.endswith((b"data: [DONE]\n\n\r\n0\r\n\r\n", b"}")):
            self.connection_made(self._transport)


def send_load(url: str, body: dict[str, Any], clients: int, received: Any) -> None:
    """The process of the clients."""
    host, _, port = url.removeprefix("http://").rpartition(":")
    path, mark = ("chat/completions", b'"delta":{"content"') if "messages" in body else ("completions", b'"text":')
    text = json.dumps(body)
    head = f"POST /v1/{path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nContent-Length: {len(text)}"
    given = f"{head}\r\n\r\n{text}".encode(), body["max_tokens"], mark if body.get("stream") else None, received

    async def connect() -> None:
        for _ in range(clients):
            await asyncio.get_running_loop().create_connection(lambda: Client(*given), host, int(port))
        await asyncio.Event().wait()

    asyncio.run(connect())


def processor_seconds(pid: int) -> float:
    """Processor time of a process, of all its threads, user and system."""
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def measure(args: argparse.Namespace, facts: EngineFacts, table: list[int], load: str, count: int) -> dict[str, Any]:
    """One load with ``count`` processes."""
    received, made = multiprocessing.RawValue("q"), [0]
    lead = args.clients * (2 if LOADS[load].get("stream") else args.tokens)
    engines: list[Any] = [Engine(facts, table, lead, received, made) for _ in range(count)]
    bound = bind("127.0.0.1", 0)
    url = url_of(bound)
    options = ServerOptions(api_server_count=count, max_waiting_requests=args.clients)
    front = HttpProcesses(engines, options, bound)
    prompt: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}]} if args.chat else {"prompt": [5, 6, 7]}
    body: dict[str, Any] = prompt | {"max_tokens": args.tokens, "temperature": 0.0, "ignore_eos": True} | LOADS[load]
    await_answer(url)
    clients = multiprocessing.get_context("spawn").Process(
        target=send_load, args=(url, body, args.clients, received), daemon=True
    )
    clients.start()
    try:
        while received.value < args.clients * args.tokens:
            time.sleep(0.01)
        time.sleep(1.0)
        begin, tokens = time.perf_counter(), received.value
        requests = [engine.requests for engine in engines]
        before = [processor_seconds(pid) for pid in front.pids]
        time.sleep(args.seconds)
        used = [processor_seconds(pid) - then for pid, then in zip(front.pids, before)]
        tokens, seconds = received.value - tokens, time.perf_counter() - begin
        requests = [engine.requests - then for engine, then in zip(engines, requests)]
    finally:
        clients.kill()
        clients.join()
        front.stop()
        front.wait()
    return {
        "load": load,
        "processes": count,
        "tokens_per_second": tokens / seconds,
        "tokens_per_processor_second": tokens / sum(used),
        "processor_us_per_token": 1e6 * sum(used) / tokens,
        "requests_of_each": requests,
        "cores_used": sum(used) / seconds,
    }


def await_answer(url: str) -> None:
    """Waits until a server answers."""
    until = time.monotonic() + 120
    while True:
        try:
            with urlopen(f"{url}/health"):
                return
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.1)


def main() -> None:
    args = parse()
    check_outputs(args.json)
    folder = resolve_model(args.model, dummy=True)
    config, tokenizer = ModelConfig.from_pretrained(folder), Tokenizer(folder)
    facts = EngineFacts(
        folder=str(folder),
        default_sampling={},
        trust_remote_code=False,
        model_type=config.model_type,
        vocab_size=config.vocab_size,
        capacity=Capacity(1, 1, args.tokens + 1024, 64),
        max_model_len=args.tokens + 1024,
        max_num_seqs=args.clients,
        stream_interval=1,
        model=args.model,
        pid=os.getpid(),
    )
    table = tokenizer.encode(__doc__, add_special_tokens=False)
    results = [measure(args, facts, table, load, count) for load in args.load for count in args.api_server_count]
    first: dict[str, float] = {}
    rows = []
    for one in results:
        rate = one["tokens_per_second"]
        rows.append(
            [
                one["load"],
                one["processes"],
                f"{rate:,.0f}",
                f"{rate / first.setdefault(one['load'], rate):.2f}",
                f"{one['processor_us_per_token']:.1f}",
                f"{one['tokens_per_processor_second']:,.0f}",
                f"{one['cores_used']:.2f}",
                " + ".join(map(str, one["requests_of_each"])),
            ]
        )
    head = ["load", "processes", "tokens/s", "ratio", "µs a token", "tokens/s of processor time", "cores", "requests"]
    print(format_table(head, rows))
    if args.json:
        about = environment(torch.device("cpu"), torch.float32, 1) | {"options": vars(args)}
        write_json(args.json, about | {"results": results})


if __name__ == "__main__":
    run(main)
