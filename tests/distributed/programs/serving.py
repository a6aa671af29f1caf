"""Rank 0 serves threads and tasks, the other ranks follow: serving.py HOW KINDS.json RESULTS.json."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, closing
from pathlib import Path
from typing import Any

from dsa_engine import LLM, ParallelConfig, SamplingParams

HOW, KINDS, RESULTS = sys.argv[1:4]
RANK = int(os.environ["RANK"])
OPTIONS: dict[str, Any] = {"device": "cpu", "max_model_len": 256, "cache_memory": "8MiB", "page_size": 8}
THREADS = 20
Found = tuple[int, list[int], str, bool]  # the kind, tokens, text, whether it was finished


def params_of(kind: dict[str, Any]) -> SamplingParams:
    return SamplingParams(**kind["params"])


def of_a_thread(llm: LLM, kinds: list[Any], rng: random.Random) -> Found:
    number = rng.randrange(len(kinds))
    tokens, text, over = [], "", False
    time.sleep(rng.random() * 0.05)
    with closing(llm.stream(kinds[number]["prompt"], params_of(kinds[number]))) as pieces:  # type: ignore[type-var]
        for piece in pieces:
            tokens += piece.token_ids
            text += piece.text
            over = piece.finish_reason is not None
            if rng.random() < 0.02:
                break
    return number, tokens, text, over


async def of_a_task(llm: LLM, kinds: list[Any], rng: random.Random) -> Found:
    number = rng.randrange(len(kinds))
    tokens, text, over = [], "", False
    await asyncio.sleep(rng.random())
    async with aclosing(llm.astream(kinds[number]["prompt"], params_of(kinds[number]))) as pieces:
        async for piece in pieces:
            tokens += piece.token_ids
            text += piece.text
            over = piece.finish_reason is not None
    return number, tokens, text, over


def load(llm: LLM, kinds: list[Any], requests: int, tasks: int) -> dict[str, Any]:
    """Runs requests of threads and of tasks, some of which are closed early or cancelled."""

    def work(thread: int) -> list[Found]:
        rng = random.Random(thread)
        return [of_a_thread(llm, kinds, rng) for _ in range(requests // THREADS)]

    async def everything() -> list[Any]:
        rng = random.Random(11)
        running = [asyncio.create_task(of_a_task(llm, kinds, random.Random(100 + n))) for n in range(tasks)]
        while not all(task.done() for task in running):
            await asyncio.sleep(0.05)
            if rng.random() < 0.3:
                rng.choice(running).cancel()
        return await asyncio.gather(*running, return_exceptions=True)

    with ThreadPoolExecutor(THREADS + 1) as pool:
        of_tasks = pool.submit(asyncio.run, everything())
        outcomes = [one for done in [pool.submit(work, n) for n in range(THREADS)] for one in done.result()]
        ended = of_tasks.result()
    cancelled = sum(isinstance(one, asyncio.CancelledError) for one in ended)
    outcomes += [one for one in ended if not isinstance(one, asyncio.CancelledError)]
    llm.wait_idle()
    return {
        "found": outcomes,
        "cancelled": cancelled,
        "steps": llm.loop.steps,
        "preemptions": llm.engine.scheduler.preemptions,
        "pages_lost": sum(llm.engine.cache.pages - free for free in llm.engine.scheduler.free_pages),
        "logits": llm.prompt_logits([5, 6, 7]).tolist(),
    }


def main() -> None:
    llm = LLM("demo-random", **OPTIONS, parallel=ParallelConfig(timeout=20 if "kill" in HOW else 600))
    if RANK > 0:
        if HOW == "killed" and RANK == 2:
            threading.Thread(target=die_in_a_step, args=(llm,), daemon=True).start()
        if HOW == "killed idle" and RANK == 2:
            threading.Timer(2.0, os.kill, (os.getpid(), signal.SIGKILL)).start()
        llm.follow()
        print(f"rank {RANK} is done, {llm.loop.steps > 0}\n", end="", flush=True)
        return
    kinds = json.loads(Path(KINDS).read_text())
    if HOW == "killed idle":
        llm.generate([[5, 6, 7]])
        time.sleep(300)
    requests, tasks = map(int, sys.argv[4:6])
    with llm:
        Path(RESULTS).write_text(json.dumps(load(llm, kinds, requests, tasks)))


def die_in_a_step(llm: LLM) -> None:
    while llm.loop.steps < 20:
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGKILL)


main()
