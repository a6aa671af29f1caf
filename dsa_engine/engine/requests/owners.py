"""Which rank decodes a request: its owner, which keeps its pages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from dsa_engine.engine.requests.pages import Capacity, PageLedger
from dsa_engine.engine.requests.request import Request


class Load(NamedTuple):
    """What the running requests mean for their owners, by rank."""

    tokens: list[int]  # tokens that they attend to
    future_pages: list[int]  # pages that they may still ask for
    reserved_pages: list[int]  # a spare one for each that may still grow: admitting another must not preempt at once

    @classmethod
    def of(cls, running: Iterable[Request], ledger: PageLedger, capacity: Capacity) -> Load:
        ranks = capacity.world_size
        load = cls([0] * ranks, [0] * ranks, [0] * ranks)
        for request in running:
            most = capacity.most(len(request.prompt), request.max_tokens)
            more = most - ledger.held(request, request.owner)
            load.tokens[request.owner] += len(request)
            load.future_pages[request.owner] += more
            load.reserved_pages[request.owner] += min(more, 1)
        return load


def choose_owner(request: Request, ranks: Iterable[int], load: Load, free: Sequence[int], capacity: Capacity) -> int:
    """Of ``ranks``, the one whose requests see fewest tokens; before it, one that has pages for all that they and this
    one may still become. ``free`` are the free pages of every rank."""
    most = capacity.most(len(request.prompt), request.max_tokens)
    return min(ranks, key=lambda rank: (free[rank] - load.future_pages[rank] < most, load.tokens[rank], -free[rank]))
