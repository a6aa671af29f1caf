"""Two real servers of the demo model behind the real command, with the ``openai`` client: one is killed under load."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import openai
import pytest


class Process:
    """``dsa-engine WORDS``, ready to be asked at ``url``; killed at the end of a test."""

    def __init__(self, log: Path, *words: str):
        self._log, self._words, self.url = log, words, ""

    def start(self) -> None:
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        with self._log.open("w") as log:
            command = [sys.executable, "-m", "dsa_engine", *self._words]
            self.process = subprocess.Popen(command, stderr=log, env=environment)
        until = time.monotonic() + 120
        while not (match := re.search(r"http://127\.0\.0\.1:\d+$", self._log.read_text(), re.MULTILINE)):
            assert self.process.poll() is None and time.monotonic() < until, self._log.read_text()
            time.sleep(0.1)
        self.url = match[0]
        self._words = (*self._words[:-1], self.url.rpartition(":")[2])  # the same port after a restart


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[list[Process]]:
    serve = ("serve", "demo", "--device", "cpu", "--port", "0")
    made = [Process(tmp_path / f"server{number}", *serve) for number in range(2)]
    try:
        for process in made:
            process.start()
        urls = [process.url for process in made]
        made.append(Process(tmp_path / "router", "route", "--replica", *urls, "--port", "0"))
        made[-1].start()
        yield made
    finally:
        for process in made:
            if hasattr(process, "process"):
                process.process.kill()
                process.process.wait()


@pytest.mark.slow
def test_a_server_is_killed_under_load_and_comes_back(processes: list[Process]) -> None:
    """Only streams that it had begun fail; what succeeds is the same text; afterwards it gets requests again."""
    victim, _, router = processes
    client = openai.OpenAI(base_url=f"{router.url}/v1", api_key="none", max_retries=0, timeout=120)
    texts: dict[str, set[str]] = {}

    def ask(number: int) -> str:
        question = f"{'The quick brown fox jumps over the lazy dog. ' * 40} {number % 6}?"
        messages = [{"role": "user", "content": question}]
        try:
            if number % 2:
                chunks = client.chat.completions.create(
                    model="demo", messages=messages, max_tokens=32, temperature=0, stream=True
                )
                text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
            else:
                answer = client.chat.completions.create(model="demo", messages=messages, max_tokens=32, temperature=0)
                text = answer.choices[0].message.content or ""
        except openai.APIError as error:
            assert number % 2 and re.search("broke off|has ended", str(error)), error
            return "broken"
        texts.setdefault(question, set()).add(text)
        return "whole"

    def workers() -> list[dict[str, object]]:
        return httpx.get(f"{router.url}/workers", trust_env=False).json()["workers"]

    with ThreadPoolExecutor(16) as pool:
        asked = [pool.submit(ask, number) for number in range(90)]
        while sum(one.done() for one in asked) < 30 or not workers()[0]["requests"]:
            time.sleep(0.01)
        victim.process.send_signal(signal.SIGKILL)
        victim.process.wait()
        results = [one.result() for one in asked]
    assert results.count("whole") > 90 - 16 and all(len(same) == 1 for same in texts.values())
    assert [one["state"] for one in workers()] == ["dead", "ready"]
    victim.start()
    until = time.monotonic() + 20
    while workers()[0]["state"] != "ready":
        assert time.monotonic() < until
        time.sleep(0.1)
    httpx.put(f"{router.url}/workers/1", json={"draining": True}, trust_env=False)
    assert ask(1) == "whole"  # by the one that came back
    router.process.terminate()
    assert router.process.wait(30) == 0
