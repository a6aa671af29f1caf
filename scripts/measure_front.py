"""Tokens a second of the processes that speak HTTP, with an engine that costs nothing.

The engine is a thread that answers over the channel of a real one, with tokens from a table. A step gives every request
a token; it waits until nine tenths of the clients have a request, and until the clients have nearly all tokens of the
steps before. Clients, in a process of their own, send a request as soon as they have the answer to the last one.

Clients and engine take processor time too. The column that holds on any machine is tokens per second of processor time
of the HTTP processes: with idle cores, each of them reaches it.

Example:
    python scripts/measure_front.py --clients 256 --api-server-count 1 2
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import threading
import time
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any

import torch
import zmq

from dsa_engine.commands.arguments import add_json_argument, argument_parser, run
from dsa_engine.config.model import ModelConfig
from dsa_engine.engine.calls.reply import RequestRecord
from dsa_engine.engine.requests.limits import Capacity
from dsa_engine.engine.requests.request import Ending, SampledToken
from dsa_engine.measure.report import environment, format_table, write_json
from dsa_engine.server.http import bind, url_of
from dsa_engine.server.messages import EngineFacts, NewRequest, NewTokens, encode, to_engine
from dsa_engine.server.options import ServerOptions
from dsa_engine.server.process import HttpProcesses
from dsa_engine.system.output_files import check_outputs
from dsa_engine.text.tokenizer import Tokenizer
from dsa_engine.weights.model_folder import resolve_model

LOADS = {"events": '"stream": true', "whole": '"n": 1', "whole, stop strings": '"stop": ["never", "seen"]'}
LAST = Ending("length"), RequestRecord()
HEAD = ["load", "processes", "tokens/s", "ratio", "µs a token", "tokens/s of processor time", "cores", "requests"]


def parse() -> argparse.Namespace:
    parser = argument_parser(__doc__)
    parser.add_argument("--model", default="demo", help="as of LLM; only its configuration and tokenizer are read")
    parser.add_argument("--clients", type=int, default=256, help="requests that run at once")
    parser.add_argument("--tokens", type=int, default=128, help="mean tokens of an answer; from half to 3/2 of it")
    parser.add_argument("--seconds", type=float, default=5.0, help="time of a measurement, after a second of warm-up")
    parser.add_argument("--api-server-count", type=int, nargs="+", default=[1, 2], help="HTTP processes")
    parser.add_argument(
        "--load", nargs="+", choices=LOADS, default=list(LOADS), help="an event a token, or whole answers"
    )
    parser.add_argument("--chat", action="store_true", help="ask /v1/chat/completions instead of /v1/completions")
    add_json_argument(parser)
    args = parser.parse_args()
    if min(args.clients, args.tokens, args.seconds, *args.api_server_count) < 1:
        raise ValueError("--clients, --tokens, --seconds and --api-server-count must be at least 1")
    return args


class Channel:
    """The channel to one HTTP process, in place of :class:`dsa_engine.server.process.Relay`."""

    def __init__(self, facts: EngineFacts):
        self.facts, self._folder, self._context = facts, TemporaryDirectory(prefix="dsa_engine-"), zmq.Context()
        self.folder = self._folder.name
        self.tokens, self.requests = self._context.socket(zmq.PUSH), self._context.socket(zmq.PULL)
        self.tokens.set_hwm(0)
        self.requests.bind(f"ipc://{self.folder}/requests")
        self.tokens.connect(f"ipc://{self.folder}/tokens")
        self.running: dict[int, int] = {}  # tokens that are still to come, by request
        self.taken = 0  # requests so far
        self.silent = 0

    def take(self) -> None:
        while self.requests.poll(0):
            self.silent = 0
            new = [one for one in to_engine(self.requests.recv()) if isinstance(one, NewRequest)]
            self.running |= {one.id: one.params["max_tokens"] for one in new}
            self.taken += len(new)

    def step(self, table: list[int]) -> int:
        """Sends each request a token; returns their number."""
        step = [
            NewTokens(number, [SampledToken(table[(number + n) % len(table)])], *((None, None) if n > 1 else LAST))
            for number, n in self.running.items()
        ]
        if step:
            self.tokens.send(encode(step))
        self.running = {number: n - 1 for number, n in self.running.items() if n > 1}
        return len(step)

    def close(self) -> None:
        """Nothing: the engine's thread may be at work here."""


def run_engine(
    channels: list[Channel], table: list[int], clients: int, lead: int, received: Any, stop: threading.Event
) -> None:
    made = 0
    while not stop.is_set():
        for channel in channels:
            channel.take()
        if made - received.value > lead or sum(len(channel.running) for channel in channels) < 0.9 * clients:
            time.sleep(0.0002)
        else:
            made += sum(channel.step(table) for channel in channels)


class Client(asyncio.Protocol):
    """Sends the same request again and again over one connection, and counts the tokens that come.

    Args:
        mark: is once in each event with text; None: the answer is whole.
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
            self._transport.write(self._request)


def send_load(url: str, load: str, clients: int, tokens: int, chat: bool, received: Any) -> None:
    """The process of the clients."""
    host, _, port = url.removeprefix("http://").rpartition(":")
    path, mark = ("chat/completions", b'"delta":{"content"') if chat else ("completions", b'"text":')
    prompt = '"messages": [{"role": "user", "content": "a"}]' if chat else '"prompt": [5, 6, 7]'

    def client(number: int) -> Client:
        length = max(1, tokens // 2 + tokens * number // clients)
        body = f'{{{prompt}, {LOADS[load]}, "max_tokens": {length}, "temperature": 0.0, "ignore_eos": true}}'
        head = f"Host: {host}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        request = f"POST /v1/{path} HTTP/1.1\r\n{head}\r\n\r\n{body}".encode()
        return Client(request, length, mark if load == "events" else None, received)

    async def connect() -> None:
        loop = asyncio.get_running_loop()
        for number in range(clients):
            await loop.create_connection(partial(client, number), host, int(port))
        await asyncio.Event().wait()

    asyncio.run(connect())


def processor_seconds(pid: int) -> float:
    """Processor time of a process, of all its threads, user and system."""
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(args: argparse.Namespace, facts: EngineFacts, table: list[int], load: str, count: int) -> dict[str, Any]:
    """Measures one load with ``count`` processes."""
    received, stop = multiprocessing.RawValue("q"), threading.Event()
    channels: list[Any] = [Channel(facts) for _ in range(count)]
    bound = bind("127.0.0.1", 0)
    url = url_of(bound)
    front = HttpProcesses(channels, ServerOptions(api_server_count=count), bound)
    lead = args.clients * (2 if load == "events" else 2 * args.tokens)  # whole answers are seen at their end only
    engine = threading.Thread(target=run_engine, args=(channels, table, args.clients, lead, received, stop))
    given = (url, load, args.clients, args.tokens, args.chat, received)
    clients = multiprocessing.get_context("spawn").Process(target=send_load, args=given, daemon=True)

    def counts() -> list[Any]:
        seconds = (processor_seconds(pid) for pid in front.pids)
        return [received.value, *seconds, *(channel.taken for channel in channels)]

    engine.start()
    clients.start()
    try:
        while received.value < args.clients * args.tokens:
            time.sleep(0.01)
        time.sleep(1.0)
        before = [
            received.value,
            *(processor_seconds(pid) for pid in front.pids),
            *(channel.taken for channel in channels),
        ]
        begin = time.perf_counter()
        time.sleep(args.seconds)
        now = [
            received.value,
            *(processor_seconds(pid) for pid in front.pids),
            *(channel.taken for channel in channels),
        ]
        seconds = time.perf_counter() - begin
    finally:
        clients.kill()
        front.stop()
        front.wait()
        stop.set()
        engine.join()
    tokens, *used = (b - a for a, b in zip(before, now))
    used, requests = used[:count], used[count:]
    return {
        "load": load,
        "processes": count,
        "tokens_per_second": tokens / seconds,
        "processor_us_per_token": 1e6 * sum(used) / tokens,
        "tokens_per_processor_second": tokens / sum(used),
        "cores": sum(used) / seconds,
        "requests_of_each": requests,
    }


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
        max_model_len=2 * args.tokens + 1024,
        max_num_seqs=args.clients,
        stream_interval=1,
        model=args.model,
        pid=os.getpid(),
    )
    table = tokenizer.encode(__doc__, add_special_tokens=False)
    results = [measure(args, facts, table, load, count) for load in args.load for count in args.api_server_count]
    if args.json:
        about = environment(torch.device("cpu"), torch.float32, 1) | {"options": vars(args)}
        write_json(args.json, about | {"results": results})
    first: dict[str, float] = {}
    rows = []
    for load, count, rate, microseconds, processor_rate, cores, requests in (one.values() for one in results):
        ratio = rate / first.setdefault(load, rate)
        row = [f"{rate:,.0f}", f"{ratio:.2f}", f"{microseconds:.1f}", f"{processor_rate:,.0f}", f"{cores:.2f}"]
        rows.append([load, count, *row, " + ".join(map(str, requests))])
    print(format_table(HEAD, rows))


if __name__ == "__main__":
    run(main)
