"""Many clients at once: good ones get their tokens, others an error or nothing, and nothing remains of any."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import http_load
from caches import resident_bytes
from dsa_engine import LLM, SamplingParams


@pytest.fixture(scope="module")
def tiny(tiny_llm: Callable[..., LLM]) -> LLM:
    return tiny_llm(400, max_num_seqs=32)


@pytest.fixture(scope="module")
def kinds(tiny: LLM) -> list[dict[str, Any]]:
    """Requests, with the tokens that ``generate`` gives."""
    rng, made = random.Random(5), []
    for number in range(20):
        params = {"max_tokens": rng.choice([1, 3, 8, 20]), "ignore_eos": True, "seed": number, "temperature": 0.7}
        prompt = [rng.randrange(4, 300) for _ in range(rng.choice([1, 5, 20, 60]))]
        made.append({"prompt": prompt, "params": params | {"top_p": 0.95}})
    outputs = tiny.generate([one["prompt"] for one in made], [SamplingParams(**one["params"]) for one in made])
    return [one | {"tokens": output.token_ids} for one, output in zip(made, outputs)]


@pytest.mark.parametrize(
    ("clients", "requests"), [(30, 250), pytest.param(200, 5000, marks=pytest.mark.slow)], ids=["few", "many"]
)
def test_no_request_is_wrong_or_lost(
    serve: Any, tiny: LLM, kinds: list[dict[str, Any]], clients: int, requests: int, tmp_path: Path
) -> None:
    server = serve(tiny)
    loads: list[dict[str, Any]] = []
    sizes = [resident_bytes()]
    if clients < 100:
        loads.append(http_load.load(server.port, clients, requests, 1, kinds))
    else:  # in processes, so that this one's memory is the server's
        (tmp_path / "kinds.json").write_text(json.dumps(kinds))
        for seed in range(5):
            words = map(str, (server.port, clients, requests // 5, seed, tmp_path / "kinds.json"))
            started = time.monotonic()
            done = subprocess.run(
                [sys.executable, http_load.__file__, *words], capture_output=True, text=True, timeout=900
            )
            assert done.returncode == 0, done.stderr
            loads.append(json.loads(done.stdout))
            sizes.append(resident_bytes())
            print(f"{requests // 5} requests in {time.monotonic() - started:.1f} s: {loads[-1]['seen']}")
        print("resident memory: " + ", ".join(f"{size / 2**20:.1f} MiB" for size in sizes))
        assert sizes[-1] - sizes[1] < 8 * 2**20, "the first fifth fills caches; then memory must be flat"
    assert [one for load in loads for one in load["wrong"]] == []
    assert sum(count for load in loads for count in load["seen"].values()) == requests
    until = time.monotonic() + 20
    while tiny.engine.scheduler.has_work or server.http.app_server.admission.outputs:
        assert time.monotonic() < until, "a request whose client has left runs on"
        time.sleep(0.01)
    tiny.wait_idle()
    assert tiny.engine.scheduler.free_pages == [tiny.engine.cache.pages]
    begin = 'vllm:request_success_total{engine="0",finished_reason="error"'
    (failed,) = [line for line in server.get("/metrics").text.splitlines() if line.startswith(begin)]
    assert failed.endswith(" 0.0")
