"""The choice of a request's ranks: the group that prefills it, and its owner, which decodes it and keeps its pages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from dsa_engine.engine.cache.ledger import PageLedger
from dsa_engine.engine.requests.capacity import Capacity
from dsa_engine.engine.requests.decoding import Decoding
from dsa_engine.engine.requests.request import Request
from dsa_engine.engine.requests.samples import Ints


class Load(NamedTuple):
    """Load of each rank by the running requests that it owns; int64 ``[world]`` each."""

    tokens: Ints  # tokens that the requests attend to
    future_pages: Ints  # pages that the requests may still ask for
    reserved_pages: Ints  # one for each request that may still grow: a new one must not preempt it at once

    @classmethod
    def of(cls, decoding: Decoding, prefilling: Iterable[Request], ledger: PageLedger, capacity: Capacity) -> Load:
        more = -(-(decoding.limit - 1) // capacity.page_size) - decoding.pages
        columns = (decoding.length, more, np.minimum(more, 1))
        load = cls(*(np.bincount(decoding.owner, of, capacity.world_size).astype(np.int64) for of in columns))
        for request in prefilling:
            left = capacity.max_pages(len(request.prompt), request.max_tokens) - ledger.held(request, request.owner)
            load.tokens[request.owner] += len(request)
            load.future_pages[request.owner] += left
            load.reserved_pages[request.owner] += min(left, 1)
        return load


def choose_group(cached: Mapping[int, int], groups: Sequence[range], prefilling: Iterable[Request], load: Load) -> int:
    """Chooses the context-parallel group that is likely to finish a request's prefill first: the one with the fewest
    tokens to prefill, the request's own included.

    Among equal groups, as the cost of decoding grows with the tokens that a rank's requests attend to, it is the one
    with the fewest of them.

    Args:
        cached: by number of each group with room for the request, the tokens of the request that it need not prefill.
        groups: the ranks of every group.
    """
    to_prefill = {number: -tokens for number, tokens in cached.items()}
    for other in prefilling:
        if other.cp_group in to_prefill:
            to_prefill[other.cp_group] += other.num_prefill_tokens - other.num_computed_tokens
    return min(
        cached,
        key=lambda number: (to_prefill[number], int(load.tokens[groups[number][0] : groups[number][-1] + 1].sum())),
    )


def choose_owner(
    request: Request,
    ranks: Iterable[int],
    load: Load,
    free: Sequence[int],
    capacity: Capacity,
    absent: Mapping[int, int] | None = None,
) -> int:
    """Chooses the owner among ``ranks``; ``free`` lists the free pages of every rank.

    Ranks with enough pages for everything that their requests and this one may still ask for come first. Among these,
    the rank is chosen whose requests attend to the fewest tokens; tokens of this request that it had to fetch count
    like those, so that a request goes back to its last owner unless that one has the longer contexts.

    Args:
        absent: by rank, the number of this request's pages that the rank had to fetch; default: none.
    """
    need = capacity.max_pages(len(request.prompt), request.max_tokens)
    tokens, future = load.tokens.tolist(), load.future_pages.tolist()
    for rank, pages in (absent or {}).items():
        tokens[rank] += capacity.page_size * pages
    return min(ranks, key=lambda rank: (free[rank] - future[rank] < need, tokens[rank], -free[rank]))
