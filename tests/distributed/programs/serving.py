"""Rank 0 serves threads and tasks, the other ranks follow: serving.py HOW KINDS.json RESULTS.json."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from callers import run_callers
from dsa_engine import LLM, ParallelConfig

HOW, KINDS, RESULTS = sys.argv[1:4]
RANK = int(os.environ["RANK"])
OPTIONS: dict[str, Any] = {"device": "cpu", "max_model_len": 256, "cache_memory": "8MiB", "page_size": 8}
THREADS = 20


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
        answers, cancelled = run_callers(llm, kinds, requests, tasks, THREADS)
        lost = sum(llm.engine.cache.pages - free for free in llm.engine.scheduler.free_pages)
        results = {"found": answers, "cancelled": cancelled, "pages_lost": lost}
        Path(RESULTS).write_text(json.dumps(results | {"logits": llm.prompt_logits([5, 6, 7]).tolist()}))


def die_in_a_step(llm: LLM) -> None:
    while llm.loop.steps < 20:
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGKILL)


main()
