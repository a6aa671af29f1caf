"""``torchrun -m dsa_engine serve``: rank 0 serves, the other follows; the end, in order and out of order."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from dsa_engine import LLM, SamplingParams
from recipes import Recipe, recipes, tiny, words_of

ROOT = Path(__file__).resolve().parents[3]
LONG = {"prompt": [5, 6], "max_tokens": 900, "ignore_eos": True}


@contextmanager
def served(
    ranks: int, log: Path, *options: str, model: str = "demo-random"
) -> Iterator[tuple[httpx.Client, subprocess.Popen[str]]]:
    """A client of a server on several ranks, and the launcher's process."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [*launcher, "-m", "dsa_engine", "serve", model, "--device", "cpu", "--port", str(port)]
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("MASTER_", "RANK", "WORLD"))
    }
    with log.open("w") as file:
        process = subprocess.Popen(
            [*command, "--cache-memory", "32MiB", *options],
            stdout=file, stderr=file, text=True, cwd=ROOT, start_new_session=True,
            env=environment | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        )  # fmt: skip
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120) as client:
            until = time.monotonic() + 120
            while not _answers(client):
                assert process.poll() is None and time.monotonic() < until, log.read_text()
                time.sleep(0.1)
            yield client, process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _answers(client: httpx.Client) -> bool:
    try:
        return client.get("/ready").status_code == 200
    except httpx.TransportError:
        return False


def pid_of(rank: int, launcher: int) -> int:
    """The process of a rank: the child of the launcher with this RANK in its environment."""
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    (pid,) = [int(one) for one in children if f"\0RANK={rank}\0".encode() in Path(f"/proc/{one}/environ").read_bytes()]
    return pid


@pytest.mark.parametrize("options", [(), pytest.param(("--prefill-ranks", "1"), marks=pytest.mark.slow)], ids=str)
def test_tokens_and_a_rank_that_is_killed_under_load(
    demo_random: LLM, tmp_path: Path, options: tuple[str, ...]
) -> None:
    """Tokens are those of one process. Then every client gets an error soon, whole or streamed; both ranks end."""
    prompts = [[(number * 7 + i) % 300 + 4 for i in range(3 * number + 1)] for number in range(12)]
    params: dict[str, Any] = {"max_tokens": 12, "temperature": 0.8, "seed": 1, "ignore_eos": True, "top_p": 0.95}
    wanted = [one.token_ids for one in demo_random.generate(prompts, SamplingParams(**params))]
    options = ("--max-model-len", "2048", *options)
    with served(2, tmp_path / "log", *options) as (client, process), ThreadPoolExecutor(12) as pool:

        def tokens(prompt: list[int]) -> list[int]:
            body = {"prompt": prompt, "return_token_ids": True, **params}
            return client.post("/v1/completions", json=body).json()["choices"][0]["token_ids"]

        def outcome(number: int) -> str:
            try:
                return client.post("/v1/completions", json=LONG | {"stream": number % 2 == 0}).text
            except httpx.TransportError as error:
                return f"error: {error!r}"

        assert list(pool.map(tokens, prompts)) == wanted
        running = [pool.submit(outcome, number) for number in range(12)]
        while 'vllm:num_requests_running{engine="0",model_name="demo-random"} 12.0' not in client.get("/metrics").text:
            time.sleep(0.05)
        rank_0 = pid_of(0, process.pid)
        os.kill(pid_of(1, process.pid), signal.SIGKILL)
        killed = time.monotonic()
        outcomes = [one.result() for one in running]
        seconds = time.monotonic() - killed
        assert all("error" in one for one in outcomes), outcomes
        assert seconds < 30, "no collective's timeout (600 s) had to be waited for"
        assert process.wait(60) != 0
        assert not Path(f"/proc/{rank_0}").exists()
    print(f"12 errors {seconds:.2f} s after the end of rank 1: {sorted(one[-200:] for one in outcomes)}")


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--prefill-ranks", "1")], ids=str)
def test_an_end_in_order(tmp_path: Path, options: tuple[str, ...]) -> None:
    """After SIGTERM, which the launcher passes on to both ranks, a stream that runs comes to its end."""
    with served(2, tmp_path / "log", "--max-model-len", "2048", *options) as (client, process):
        with client.stream("POST", "/v1/completions", json=LONG | {"stream": True, "max_tokens": 60}) as stream:
            lines = stream.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert json.loads(rest[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
        process.wait(60)
    log = (tmp_path / "log").read_text()
    assert "shutting down: running requests have 20 seconds" in log and "failed and ends the run" not in log


@pytest.mark.slow
@pytest.mark.parametrize("recipe", recipes(), ids=lambda one: one.title)
def test_recipes(recipe: Recipe, int4_folder: Path, tmp_path: Path) -> None:
    """The server of each recipe, with a tiny model: it answers, on two ranks as on the one of the last recipe."""
    ranks, _, (command, model, *options) = tiny(words_of(recipe.commands)[-1], int4_folder)
    assert command == "serve"
    with served(ranks, tmp_path / "log", *options, model=model) as (client, process):
        body = {
            "prompt": [4 + i % 200 for i in range(300)],
            "max_tokens": 8,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        answers = [client.post("/v1/completions", json=body | {"temperature": 0.0}).json() for _ in range(2)]
        tokens = [answer["choices"][0]["token_ids"] for answer in answers]
        assert len(tokens[0]) == 8 and tokens[0] == tokens[1]
        process.send_signal(signal.SIGTERM)
        process.wait(60)
    assert "failed and ends the run" not in (tmp_path / "log").read_text()
