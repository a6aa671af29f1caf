"""The line of the log with throughput, requests, use of the caches and prefix hits."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Iterator

import pytest

from dsa_engine import LLM, SamplingParams
from dsa_engine.engine import stats_log
from dsa_engine.engine.stats_log import StatsLog

PROMPT = list(range(1, 51))


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo-random", device="cpu", max_model_len=256, page_size=10, cache_memory="10MB") as llm:
        yield llm


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    now = [0.0]
    monkeypatch.setattr(stats_log.time, "monotonic", lambda: now[0])
    yield now


def test_the_figures_since_the_line_before(llm: LLM, clock: list[float]) -> None:
    engine, params = llm.engine, SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    log = StatsLog(engine)
    assert log.line() is None  # idle from the start
    first = engine.add(PROMPT, params)
    engine.step()
    engine.add(PROMPT[:20], params)
    clock[0] += 2.0
    line = log.line()
    pages = engine.scheduler.ledger.pages
    assert line is not None and "prefill 25.0 tokens/s, decode 0.5 tokens/s; 1 running, 1 waiting" in line
    assert f"caches {5 / pages:.1%} used, prefix cache hit rate 0.0%" in line
    while engine.has_work:
        engine.step()
    assert len(first.output) == 4
    clock[0] += 1.0
    # The second request found a page and computed the other 10 tokens; 3 and 4 tokens were sampled.
    line = log.line()
    assert line is not None and "prefill 10.0 tokens/s, decode 7.0 tokens/s; 0 running, 0 waiting" in line
    assert line.endswith("caches 0.0% used, prefix cache hit rate 50.0%")
    assert log.line() is None


def test_lines_come_while_requests_run_and_end_with_the_log(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "dsa_engine")
    with StatsLog(llm.engine, interval_s=0.001):
        llm.engine.add(PROMPT, SamplingParams(max_tokens=4, ignore_eos=True))
        while llm.engine.has_work:
            llm.engine.step()
    lines = [record.getMessage() for record in caplog.records if "tokens/s" in record.getMessage()]
    assert lines and all(re.match(r"prefill [\d,.]+ tokens/s, decode [\d,.]+ tokens/s; ", line) for line in lines)
    assert not [thread for thread in threading.enumerate() if "stats log" in thread.name]
