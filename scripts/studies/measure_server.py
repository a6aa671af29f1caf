"""The engine's throughput through its HTTP server, against that without it, in turn in one process.

scripts/studies/measure_server.py [--batch-size 32] [--requests 128] [--output-len 128] [--repeat 10]

Each round answers the same requests by ``LLM.generate``, by ``LLM.astream``, through the server with whole answers and
through the server with streams. All requests are sent at once; the engine runs ``--batch-size`` of them at a time, and
when one ends, the next begins. HTTP is a process of its own, as in ``dsa-engine serve``, and so are its clients. The
ratio is the median over rounds of ``generate``'s time by the time of the other way: 1 if that costs nothing. The
processor time is that of the engine's process, all threads together.
Read the load first: on a busy machine only the processor time says something.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from urllib.request import urlopen

import stream_clients
from dsa_engine import LLM, SamplingParams
from dsa_engine.arguments import add_json_argument, argument_parser, run
from dsa_engine.measure.report import format_table, run_report, write_json
from dsa_engine.server.listen import bind, url_of
from dsa_engine.server.options import ServerOptions
from dsa_engine.server.remote.process import HttpProcess
from dsa_engine.system.output_files import check_outputs
from stream_clients import prompt

_CLIENTS = Path(stream_clients.__file__)


def parse() -> argparse.Namespace:
    parser = argument_parser(__doc__)
    parser.add_argument("--model", default="demo", help="as of LLM")
    parser.add_argument("--batch-size", type=int, default=32, help="requests that the engine runs at a time")
    parser.add_argument("--requests", type=int, default=128, help="requests of a round")
    parser.add_argument("--output-len", type=int, default=128, help="tokens of an output on average: 3/4 to 5/4 of it")
    parser.add_argument("--stream-interval", type=int, default=1, help="tokens of a piece of a stream")
    parser.add_argument("--repeat", type=int, default=10, help="rounds, after one that is not counted")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    add_json_argument(parser)
    args = parser.parse_args()
    if min(args.repeat, args.batch_size, args.requests) < 1 or args.output_len < 4:
        raise ValueError("--repeat, --batch-size and --requests must be at least 1, --output-len at least 4")
    return args


def output_lengths(requests: int, mean: int) -> list[int]:
    """3/4 to 5/4 of the mean, in turn; no two neighbours are alike."""
    return [mean * 3 // 4 + number * 7 % (mean // 2 + 1) for number in range(requests)]


def main() -> None:
    args = parse()
    check_outputs(args.json)
    options = {
        "max_model_len": 2 * args.output_len + 8,
        "max_num_seqs": args.batch_size,
        "enable_prefix_caching": False,
    }
    with LLM(args.model, device=args.device, progress=False, **options) as llm:
        bound = bind("127.0.0.1", 0)
        url = url_of(bound)
        http = HttpProcess(llm, ServerOptions(), bound)
        try:
            _await(url)
            rounds = _rounds(llm, url.rpartition(":")[2], args)
        finally:
            http.stop()
            http.wait()
        _report(llm, args, rounds)


def _await(url: str) -> None:
    """Waits until a server answers."""
    while True:
        with suppress(OSError), urlopen(f"{url}/ready"):
            return
        time.sleep(0.05)


def _rounds(llm: LLM, port: str, args: argparse.Namespace) -> list[dict[str, tuple[float, float]]]:
    """Seconds, and seconds of processor time, of each way in each round."""
    lengths = output_lengths(args.requests, args.output_len)
    command = [sys.executable, str(_CLIENTS), "127.0.0.1", port, *map(str, lengths)]
    prompts = [prompt(number) for number in range(args.requests)]
    params = [SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True) for length in lengths]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as clients:
        assert clients.stdin is not None and clients.stdout is not None

        def direct() -> float:
            begun = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            return time.perf_counter() - begun

        def streamed() -> float:
            begun = time.perf_counter()
            asyncio.run(_read_streams(llm, prompts, params))
            return time.perf_counter() - begun

        def served(how: str) -> float:
            print(how, file=clients.stdin, flush=True)
            return float(clients.stdout.readline())  # type: ignore[union-attr]

        ways: dict[str, Callable[[], float]] = {
            "without": direct,
            "without, streams": streamed,
            "whole": lambda: served("whole"),
            "stream": lambda: served("stream"),
        }
        rounds = [{name: _with_cpu(way) for name, way in ways.items()} for _ in range(args.repeat + 1)]
        clients.stdin.close()
    return rounds[1:]


async def _read_streams(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> None:
    async def read(token_ids: list[int], how: SamplingParams) -> None:
        async for _ in llm.astream(token_ids, how):
            pass

    await asyncio.gather(*map(read, prompts, params))


def _with_cpu(way: Callable[[], float]) -> tuple[float, float]:
    before = time.process_time()
    seconds = way()
    return seconds, time.process_time() - before


def _report(llm: LLM, args: argparse.Namespace, rounds: list[dict[str, tuple[float, float]]]) -> None:
    tokens = sum(output_lengths(args.requests, args.output_len))
    result = {
        name: {
            "tokens_per_s": tokens / statistics.median(one[name][0] for one in rounds),
            "ratio": statistics.median(one["without"][0] / one[name][0] for one in rounds),
            "cpu_ms_per_token": 1e3 * statistics.median(one[name][1] for one in rounds) / tokens,
        }
        for name in rounds[0]
    }
    if args.json:
        write_json(args.json, run_report(llm, vars(args), 1) | {"ways": result, "load": os.getloadavg()[0]})
    rows = [
        [name, f"{one['tokens_per_s']:,.0f}", f"{one['ratio']:.3f}", f"{one['cpu_ms_per_token']:.3f}"]
        for name, one in result.items()
    ]
    print(format_table(["server", "tokens/s", "of without", "processor ms a token"], rows))
    print(f"{args.requests} requests, {args.batch_size} at a time, {len(rounds)} rounds, load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    run(main)
