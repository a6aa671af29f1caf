"""Messages from callers to the engine's loop: plain data, which rank 0 sends to all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from dsa_engine.sampling_params import SamplingParams


@dataclass
class Add:
    """A new request, checked and normalised by :func:`.new_request.new_requests`: the caches can hold it, if alone.

    Attributes:
        prompt_ids: an array of int32: 4 bytes a token in memory, which the request shares, and in a message.
        id: grows with the order of arrival; set when the message is sent.
        params: for one output, with ``max_tokens`` a number; a copy of the caller's object.
        bad_words: token ids of each word that must not be generated.
        arrival: time of the call in seconds, by ``time.perf_counter`` on the rank that was called.
        cache_salt: requests with different salts share no cached pages.
    """

    prompt_ids: Sequence[int]
    params: SamplingParams
    bad_words: list[list[int]] = field(default_factory=list)
    arrival: float = 0.0
    id: int = -1
    cache_salt: str | None = None


@dataclass(frozen=True)
class Abort:
    """Ends these requests; ids of requests that have ended or never came are ignored."""

    ids: tuple[int, ...]


Job = Literal["prefill", "prompt_logits", "reset_prefix_cache", "wait"]


@dataclass(frozen=True)
class Run:
    """A job that needs the engine for itself: it waits for the requests before it, and the requests after it wait.

    Attributes:
        job: a prefill, see :func:`.jobs.run_job`; "wait" computes nothing.
    """

    id: int
    job: Job
    prompt_ids: Sequence[int]


@dataclass(frozen=True)
class Shutdown:
    """Ends the loop on all ranks and aborts running requests."""


Message = Add | Abort | Run | Shutdown
