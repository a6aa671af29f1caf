"""Messages between the process of the HTTP server and that of the engine, in MessagePack over ZMQ.

The sockets are files in a folder of this user alone, so both processes trust each other.
"""

from __future__ import annotations

from array import array
from dataclasses import fields
from typing import TYPE_CHECKING, Any, get_origin

import msgspec
import numpy as np

from dsa_engine.engine.requests.limits import Add, Limits
from dsa_engine.engine.requests.samples import StepTokens
from dsa_engine.outputs import Logprob
from dsa_engine.parallel.failure import is_transport_error
from dsa_engine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from dsa_engine.engine.engine import Engine

ENGINE_ENDED = 1  # exit status of an HTTP process, which has said so
STOP = b"."  # what its standard input brings after :class:`Start`
_PARAMS = tuple(f.name for f in fields(SamplingParams) if f.init)
_OTHERS = tuple({f.name for f in fields(Add)} - {"id", "prompt_ids", "params", "compiled"})


class EngineFacts(msgspec.Struct, frozen=True):
    """What the HTTP server knows of the engine."""

    folder: str
    default_sampling: dict[str, Any]  # see :class:`dsa_engine.engine.calls.async_calls.AsyncCalls`
    trust_remote_code: bool
    model_type: str
    limits: Limits
    max_num_seqs: int
    stream_interval: int
    model: str  # the option as it was given
    pid: int  # the engine's process
    cache: dict[str, str] = {}  # settings of the caches, as metrics show them
    kv_events: dict[str, str] | None = None  # endpoint and topic of the prefix cache's events


class Start(msgspec.Struct):
    """What a process reads first; the processes of one server are numbered, and share a folder."""

    facts: EngineFacts
    folder: str
    options: dict[str, Any]
    listening: int
    shared: str
    number: int


class NewRequest(msgspec.Struct, tag=True):
    """A new request: an :class:`.limits.Add`, its other fields by name, and those of its :class:`SamplingParams`."""

    id: int
    prompt_ids: bytes  # int32
    params: dict[str, Any]
    others: dict[str, Any]

    @classmethod
    def of(cls, add: Add) -> NewRequest:
        params = {name: getattr(add.params, name) for name in _PARAMS}
        others = {name: getattr(add, name) for name in _OTHERS}
        return cls(add.id, array("i", add.prompt_ids).tobytes(), params, others)

    def add(self, number: int) -> Add:
        """The engine's message, with its own number for the request."""
        return Add(array("i", self.prompt_ids), SamplingParams(**self.params), id=number, **self.others)


class AbortRequests(msgspec.Struct, tag=True):
    """Ends these requests; those that have ended are ignored."""

    ids: list[int]


class AskState(msgspec.Struct, tag=True):
    """Asks for the :class:`EngineState`."""


class ResetCache(msgspec.Struct, tag=True):
    """Forgets all cached pages, once the requests before it have ended."""


class CacheReset(msgspec.Struct, tag=True, array_like=True):
    """The answer to :class:`ResetCache`, in the order of these; or what it has failed with."""

    error: str | None


class NewTokens(msgspec.Struct, tag=True, array_like=True):
    """The tokens of all requests of this process from one step, by its ids."""

    step: StepTokens


class Failed(msgspec.Struct, tag=True, array_like=True):
    """The error that ends a request, or the engine (``id`` None); ``gone``: the engine ends with it."""

    id: int | None
    message: str
    gone: bool

    @classmethod
    def of(cls, number: int | None, error: BaseException) -> Failed:
        return cls(number, f"{type(error).__name__}: {error}", number is None or is_transport_error(error))


class EngineState(msgspec.Struct, tag=True, array_like=True):
    """What the engine is doing: numbers of requests, the fraction of pages that they hold, and counts so far."""

    running: int
    waiting: int
    cache_usage: float
    prefix_queries: int  # tokens of admitted requests
    prefix_hits: int  # those of them whose pages were found
    preemptions: int
    deferred: int  # of those that wait, see :class:`.scheduler.Scheduler`
    counted_tokens: int  # this and the next: see :class:`.engine.Engine`
    steps_by_tokens: list[int]
    # Pages whose latent rows lie in host memory: that requests hold, and how many have spilled so far; and what the
    # first rank's steps have read of them, see :class:`.HotCounts`.
    hot_rows: list[int]

    @classmethod
    def of(cls, engine: Engine) -> EngineState:
        scheduler, cache = engine.scheduler, engine.scheduler.prefix_cache
        running, waiting = len(scheduler.running), len(scheduler.waiting)
        counts = (cache.queries, cache.hits, scheduler.preemptions, min(scheduler.num_deferred, waiting))
        steps, spilling, hot = (engine.counted_tokens, engine.steps_by_tokens), scheduler.spilling, engine.cache.hot
        hot_rows = [0] * 5 if spilling is None or hot is None else [spilling.held, spilling.spilled, *hot.counts()]
        return cls(running, waiting, scheduler.cache_usage, *counts, *steps, hot_rows)


ToEngine = list[NewRequest | AbortRequests | AskState | ResetCache]
FromEngine = list[NewTokens | Failed | EngineState | CacheReset]


def _plain(value: Any) -> Any:
    if isinstance(value, Logprob):
        return float(value), value.rank, value.decoded_token
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    raise TypeError(f"{type(value).__name__} cannot be sent")


def _typed(kind: Any, value: Any) -> Any:
    is_array = (get_origin(kind) or kind) is np.ndarray
    return np.frombuffer(value[2], value[0]).reshape(value[1]) if is_array else kind(*value)


encode = msgspec.msgpack.Encoder(enc_hook=_plain).encode
to_engine = msgspec.msgpack.Decoder(ToEngine).decode
from_engine = msgspec.msgpack.Decoder(FromEngine, dec_hook=_typed).decode
