"""A line in the log every few seconds while requests run: throughput, requests, use of the caches, prefix hits."""

from __future__ import annotations

import logging
import threading
import time

from dsa_engine.engine.engine import Engine
from dsa_engine.model.pages.hot_rows import HotCounts
from dsa_engine.system.sizes import format_bytes

logger = logging.getLogger(__name__)


class StatsLog:
    """Writes the lines from a thread, within a ``with`` block. Rates are those since the line before. Pages that only
    the prefix cache holds count as free. The rate of prefix hits is the fraction of the tokens of admitted requests
    that were found; without new requests it stays. That of hot rows is of the rows of spilled pages that decode steps
    have selected on this rank.
    """

    def __init__(self, engine: Engine, interval_s: float = 10.0):
        self._engine, self._interval_s = engine, interval_s
        self._at, self._counts = time.monotonic(), self._read()
        self._hit_rate, self._hot = 0.0, HotCounts()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._main, name="dsa_engine stats log", daemon=True)

    def __enter__(self) -> StatsLog:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._thread.join()

    def line(self) -> str | None:
        """The figures since the call before; None if nothing ran and nothing waits."""
        scheduler = self._engine.scheduler
        now, counts = time.monotonic(), self._read()
        prefill, decode, queries, hits = (new - old for new, old in zip(counts, self._counts, strict=True))
        seconds = max(now - self._at, 1e-9)
        self._at, self._counts = now, counts
        running, waiting = len(scheduler.running), len(scheduler.waiting)
        if not (prefill or decode or running or waiting):
            return None
        if queries:
            self._hit_rate = hits / queries
        used = scheduler.cache_usage
        preempted = f", {scheduler.preemptions} preemptions so far" if scheduler.preemptions else ""
        return (
            f"prefill {prefill / seconds:,.1f} tokens/s, decode {decode / seconds:,.1f} tokens/s; {running} running, "
            f"{waiting} waiting{preempted}; caches {used:.1%} used, prefix cache hit rate {self._hit_rate:.1%}"
            f"{self._hot_rows()}"
        )

    def _hot_rows(self) -> str:
        spilling, hot = self._engine.scheduler.spilling, self._engine.cache.hot
        if spilling is None or hot is None:
            return ""
        before, self._hot = self._hot, hot.counts()
        selected, missed, fetched = (new - old for new, old in zip(self._hot, before, strict=True))
        rate = f", hot rows hit rate {1 - missed / selected:.2%}, {format_bytes(fetched)} fetched" if selected else ""
        return f"; {spilling.held} spilled pages held{rate}"

    def _read(self) -> tuple[int, int, int, int]:
        engine, cache = self._engine, self._engine.scheduler.prefix_cache
        return engine.num_prefilled_tokens, engine.num_generated_tokens, cache.queries, cache.hits

    def _main(self) -> None:
        while not self._closed.wait(self._interval_s):
            if (line := self.line()) is not None:
                logger.info("%s", line)
