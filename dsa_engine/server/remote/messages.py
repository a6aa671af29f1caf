"""Messages between the process of the HTTP server and that of the engine, besides ``Add`` and ``Abort``.

They travel over a pair of connected sockets that only these two processes have, so they are trusted, and pickled.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from dsa_engine.config.model import ModelConfig
from dsa_engine.engine.engine import Engine
from dsa_engine.engine.reply import RequestRecord
from dsa_engine.engine.requests.capacity import Capacity
from dsa_engine.engine.requests.request import Ending, SampledToken


@dataclass(frozen=True)
class EngineFacts:
    """What the HTTP server knows of the engine; the first message.

    Attributes:
        folder: the model's.
        default_sampling: see :class:`dsa_engine.async_calls.AsyncCalls`.
        model: the option ``model`` as it was given.
        pid: the engine's process.
    """

    folder: Path
    default_sampling: dict[str, Any]
    trust_remote_code: bool
    config: ModelConfig
    capacity: Capacity
    max_model_len: int
    max_num_seqs: int
    stream_interval: int
    model: str
    pid: int


class NewTokens(NamedTuple):
    """The tokens of a request from one step; ``record`` comes with the last ones. All of a step are one message."""

    id: int
    tokens: Sequence[SampledToken]
    ending: Ending | None
    record: RequestRecord | None


class Failed(NamedTuple):
    """The error that ends a request, or the engine (``id`` None)."""

    id: int | None
    error: BaseException

    @classmethod
    def of(cls, number: int | None, error: BaseException) -> Failed:
        """With an error that can be pickled: another one of the same text if this one cannot."""
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:
            error = RuntimeError(f"{type(error).__name__}: {error}")
        return cls(number, error)


class AskState(NamedTuple):
    """Asks for the :class:`EngineState`."""


class EngineState(NamedTuple):
    """What the engine is doing: numbers of requests, the fraction of pages that they hold, and counts so far."""

    running: int
    waiting: int
    cache_usage: float
    prefix_queries: int  # tokens of admitted requests
    prefix_hits: int  # those of them whose pages were found
    preemptions: int

    @classmethod
    def of(cls, engine: Engine) -> EngineState:
        scheduler, cache = engine.scheduler, engine.scheduler.prefix_cache
        running, waiting = len(scheduler.running), len(scheduler.waiting)
        return cls(running, waiting, scheduler.cache_usage, cache.queries, cache.hits, scheduler.preemptions)
