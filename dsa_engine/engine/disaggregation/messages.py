"""Messages to the leaders of the two sides: plain data. Each arrives between two steps of all ranks of a side.

Both sides know a request by its id. ``Abort`` and ``Shutdown`` of callers go from prefill to decode too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from dsa_engine.engine.requests.limits import Add
from dsa_engine.engine.requests.samples import Ints, StepTokens

# From prefill to decode.


class Reserve(NamedTuple):
    """A request will need room; ``output`` is what it has from before a preemption."""

    add: Add
    output: list[int]


class Transfer(NamedTuple):
    """The next pages of a request leave."""

    id: int
    sources: Ints  # of each page the rank that sends it, numbered in the run
    last: bool  # whether these are the request's last pages


class TransferBegun(NamedTuple):
    """What one ``PageSender.begin`` of each rank of the prefill side sends."""

    sent: tuple[Transfer, ...]


class Handover(NamedTuple):
    """The prefill is complete; the request decodes from here once its pages have come."""

    id: int
    output: list[int]
    drafts: list[int]


@dataclass(frozen=True)
class Reset:
    """Forget all cached pages that no request holds."""


# From decode to prefill.


class Reserved(NamedTuple):
    """There are pages for a request."""

    id: int
    ranks: Ints  # of each page the rank that will hold it, numbered in the run
    first: int  # number of its first pages that they have already


class TransferDone(NamedTuple):
    """All pages of these requests that were sent have come, or are not needed any more: their senders may free them."""

    ids: tuple[int, ...]


class Tokens(NamedTuple):
    """What steps have sampled, and the fraction of this side's pages that requests hold."""

    steps: list[StepTokens]
    cache_usage: float


class Preempted(NamedTuple):
    """A request has lost its pages and is to be prefilled again, with all tokens that it has."""

    id: int
    output: list[int]
    draft_stats: list[tuple[int, int]]  # of its steps on this side


# On the decode side.


class Landed(NamedTuple):
    """Those of the first ``pages`` pages of a request that a rank holds have come, says the rank."""

    id: int
    rank: int
    pages: int


class LineBroken(NamedTuple):
    """The other side cannot be reached, for this reason."""

    error: str
