"""The prefix cache: pages that other requests have computed, found by the digests of their tokens.

Pages are named during the prefill, when their rows are complete, and those of the output when the request ends or is
preempted. While a prompt is prefilled, all ranks of its context-parallel group hold its pages, later its owner does;
the pages of the other ranks stay cached. A request uses the pages that any rank of its group has (``ledger.py``).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from typing import TYPE_CHECKING

from dsa_engine.engine.cache.ledger import PageLedger
from dsa_engine.engine.requests.request import PageDigests, Request

if TYPE_CHECKING:  # needs packages of the extra "serve"
    from dsa_engine.engine.cache.kv_events import KVEvents


class PrefixCache:
    """Finds and names pages.

    Attributes:
        lookahead: number of tokens after a page that its rows depend on; to be changed only before a :meth:`reset`.
        least_computed: number of last tokens of a request that are always computed.
        events: publishes what is named and what is forgotten; None: nothing is published.
        queries, hits: number of tokens of the requests admitted so far, and of those that were found.
    """

    def __init__(self, ledger: PageLedger, page_size: int, enabled: bool, events: KVEvents | None = None):
        self._ledger = ledger
        self._page_size = page_size
        self._enabled = enabled
        self.lookahead, self.least_computed = 0, 1
        self.events = events
        self.queries, self.hits = 0, 0

    def enter(self, request: Request) -> None:
        """Lets a new request find pages, and be found."""
        if self._enabled:
            request.digests = PageDigests(self._page_size, self.lookahead, request.cache_salt)
            self.digests(request)  # those of a prompt are made as it arrives, not in the step that prefills it

    def usable(self, request: Request) -> list[bytes]:
        """Digests of the first pages of a waiting request: those that it need not compute.

        It computes its last tokens, and the tokens before those whose log-probabilities it still wants.
        """
        if request.digests is None or not request.reads_prefix_cache:
            return []
        tokens = request.num_prefill_tokens - self.least_computed
        if request.prompt_logprobs is not None and len(request.prompt_logprobs) < len(request.prompt):
            tokens = min(tokens, len(request.prompt_logprobs) - 1)
        return self.digests(request)[: max(0, tokens) // self._page_size]

    def waits(self, request: Request, usable: list[bytes], prefilling: Iterable[Request]) -> bool:
        """Whether an older request's prefill will compute at least half of what this request still has to compute, or
        an older request fetches pages that this one would fetch too.

        Only older requests are waited for, so the oldest never waits.
        """
        for other in prefilling:
            if other.digests is None or other.id >= request.id:
                continue
            common = _count_equal(other.digests.values, usable)
            if any(fetch.number < common for fetch in self._ledger.fetching(other)):
                return True
            gained = (common - other.num_named_pages) * self._page_size
            if gained > 0 and 2 * gained >= request.num_prefill_tokens - other.num_named_pages * self._page_size:
                return True
        return False

    def admitted(self, request: Request, pages: int) -> None:
        """Records that a request starts with ``pages`` pages of the cache."""
        request.num_named_pages = request.num_found_pages = pages
        request.num_computed_tokens = pages * self._page_size
        if request.num_cached_tokens is None:
            request.num_cached_tokens = request.num_computed_tokens
            self.queries += request.num_prefill_tokens
            self.hits += request.num_computed_tokens

    def name(self, request: Request) -> None:
        """Names a request's pages whose rows have been computed, or will be when the steps in flight are done."""
        computed = request.num_computed_tokens // self._page_size
        if request.digests is None or computed <= request.num_named_pages:
            return
        new = self.digests(request)[request.num_named_pages : computed]
        self._ledger.name(request, new, request.num_named_pages)
        if self.events is not None:
            self.events.stored(request, self.digests(request)[:computed], request.num_named_pages)
        request.num_named_pages += len(new)

    def release(self, request: Request, *, failed: bool = False) -> None:
        """Takes back all pages of a request; those that it has computed are forgotten if it has ``failed``."""
        if not failed:
            self.name(request)
        self._ledger.release(request, forget_from=request.num_found_pages if failed else None)
        request.num_named_pages = request.num_found_pages = 0

    def reset(self) -> None:
        """Forgets all pages."""
        self._ledger.evict_all()
        if self.events is not None:
            self.events.cleared()

    def digests(self, request: Request) -> list[bytes]:
        """Digests of those of a request's pages whose tokens are known."""
        assert request.digests is not None
        return request.digests.extend(request.num_known_tokens, request.tokens)


def _count_equal(digests: list[bytes], others: list[bytes]) -> int:
    """Number of equal digests, from the first on. Each covers those before it, so that bisection finds it."""
    shorter = range(min(len(digests), len(others)))
    return bisect_left(shorter, True, key=lambda index: digests[index] != others[index])
