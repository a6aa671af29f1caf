"""What callers tell the engine's loop: plain data, which rank 0 sends to all ranks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from dsa_engine.sampling_params import SamplingParams


@dataclass
class Add:
    """A request, checked and normalised (:func:`.new_request.new_requests`): it can run, alone at least.

    Attributes:
        id: grows with the order of arrival; given when the message is sent.
        params: for one output, with ``max_tokens`` a number; the caller's own object is not kept.
        bad_words: token ids of each word that is not to be generated.
        arrival: seconds, ``time.perf_counter`` of the rank that was called.
    """

    prompt_ids: list[int]
    params: SamplingParams
    bad_words: list[list[int]] = field(default_factory=list)
    arrival: float = 0.0
    id: int = -1


@dataclass(frozen=True)
class Abort:
    """The caller no longer wants these requests; ids of requests that have ended, or never came, mean nothing."""

    ids: tuple[int, ...]


Job = Literal["prefill", "prompt_logits", "wait"]


@dataclass(frozen=True)
class Run:
    """Something that needs the engine for itself: it waits for the requests before it, and those after it wait.

    Attributes:
        job: "wait" for just that; or a prefill, see :meth:`.engine.Engine.job`.
    """

    id: int
    job: Job
    prompt_ids: list[int]


@dataclass(frozen=True)
class Shutdown:
    """The loop ends, on all ranks; what is under way is aborted."""


Message = Add | Abort | Run | Shutdown
