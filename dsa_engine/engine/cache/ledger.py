"""Pages of all ranks: which request holds which, and what ranks copy and send to each other for it.

The ``dcp_size`` neighbouring ranks of a group hold a request's pages together: a pool is theirs (``pool.py``). While a
prompt is prefilled, each such group among the ranks of its context-parallel group holds all of its pages.

All ranks have the same ledger, as all take the same decisions; so each knows what the others have, without messages.

A request begins with the pages that any rank of its context-parallel group has. A pool that lacks one gets it from one
that has it, from rank to rank: a fetch. Fetches take place at the beginning of prefill steps, before the step computes;
a step's number of them is limited, as their buffers are.
"""

from __future__ import annotations

import time
from array import array
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from dsa_engine.engine.cache.pool import Ints, PageCopy, PageIndex, PageMoves, PagePool, as_array
from dsa_engine.engine.requests.request import Chunk, Fetch, PageDigests, Request

if TYPE_CHECKING:  # needs packages of the extra "serve"
    from dsa_engine.engine.cache.kv_events import KVEvents


def even_pages(pages: Sequence[int], ranks: int) -> int:
    """Number of pages with which a request that lies evenly has as many on its fullest rank as one with ``pages``."""
    if ranks == 1:
        return len(pages)
    return int(np.bincount(np.array(pages, np.int32) % ranks).max(initial=1)) * ranks - ranks + 1


class PageLedger:
    """The pages that every request holds in every pool; ``Request.pages`` are those in this rank's.

    Attributes:
        pools: of the groups of ``dcp_size`` neighbouring ranks that hold a request's pages together.
        pages, slots, spilled: of each rank.
        free_sets: of each pool, sets of hot rows that no request has; each has one, of its owner's pool, if there are
            spilled pages.
        max_fetched: maximum number of pages that a rank sends, and of pages that it receives, in a step.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        pages: int,
        slots: int = 0,
        max_fetched: int = 1,
        forgotten: Callable[[bytes], None] | None = None,
        dcp_size: int = 1,
        spilled: int = 0,
        sets: int = 0,
    ):
        self.spilled, self.free_sets = spilled, [[*range(sets - 1, -1, -1)] for _ in range(world_size // dcp_size)]
        self.pages, self.slots, self.max_fetched, self._rank, self.dcp_size = pages, slots, max_fetched, rank, dcp_size
        self.index = PageIndex(world_size // dcp_size, forgotten, slots > 0)
        sizes = dcp_size, spilled
        self.pools = [PagePool(pages, slots, self.index, n, *sizes) for n in range(world_size // dcp_size)]
        self._held: dict[Request, dict[int, array[int]]] = {}  # by request and pool
        self._fetches: dict[Request, deque[Fetch]] = {}  # by request whose rows are not all there

    @property
    def free(self) -> list[int]:
        """Of each pool, cached pages included, and spilled ones."""
        if self.spilled:
            return [pool.free + pool.free_spilled for pool in self.pools]
        return [pool.free for pool in self.pools]

    def pool_of(self, rank: int) -> int:
        """Number of a rank's pool."""
        return rank // self.dcp_size

    def pools_of(self, ranks: range) -> range:
        """Numbers of the pools of neighbouring ranks."""
        return range(ranks.start // self.dcp_size, ranks.stop // self.dcp_size)

    def ranks_in(self, pool: int) -> range:
        return range(pool * self.dcp_size, (pool + 1) * self.dcp_size)

    def ranks_of(self, request: Request, numbers: range, pools: range) -> Ints:
        """The rank of each of a request's pages ``numbers``, in these pools, which all have them, in turn: as many
        pages of each as it has ranks, so that all of its ranks get a turn."""
        held, size = self._held[request], self.dcp_size
        on_rank = np.array([held[pool][numbers.start : numbers.stop] for pool in pools]) % size
        turns = np.array(numbers) // size % len(pools)
        return (pools[0] + turns) * size + on_rank[turns, np.arange(len(numbers))]

    def held(self, request: Request) -> int:
        """Number of pages that a request holds in its owner's pool."""
        return len(self._held.get(request, {}).get(request.owner // self.dcp_size, ()))

    def even_pages(self, request: Request) -> int:
        """:func:`even_pages` of those that a request holds in its owner's pool."""
        return even_pages(self._held[request][request.owner // self.dcp_size], self.dcp_size)

    def holders(self, pool: int) -> list[Request]:
        return [request for request, held in self._held.items() if pool in held]

    def take(self, request: Request, pool: int, count: int) -> None:
        """Gives a request ``count`` more pages in a pool; raises ``RuntimeError`` if fewer are free."""
        held = self._held.get(request, {}).get(pool)
        self._give(request, pool, as_array(self.pools[pool].take(count, held[-1] if held else None)))

    def give(self, request: Request, pages: int) -> int:
        """Gives a request that decodes ``pages`` more pages in its owner's pool; returns its :func:`even_pages` then, 0
        if so many were not free."""
        size = self.dcp_size
        owner = request.owner // size
        pool, held = self.pools[owner], self._held[request][owner]
        if pages == 1 and (unused := pool.unused[(held[-1] + 1) % size]):  # as a rule
            held.append(unused.pop())
        elif pool.free < pages:
            return 0
        else:
            held.extend(as_array(pool.take(pages, held[-1])))
        return even_pages(held, size)

    def known(self, digests: Sequence[bytes], groups: Sequence[Sequence[int]]) -> list[int]:
        """For each group of pools, the number of digests, from the first on, whose pages any of them has."""
        numbers = self.index.find(digests)
        if not len(numbers):
            return [0] * len(groups)
        has = self.index.has[:, numbers]
        lacks = [~has[pools[0] : pools[-1] + 1].any(axis=0) for pools in groups]
        return [int(some.argmax()) if some.any() else len(numbers) for some in lacks]

    def usable(self, digests: Sequence[bytes], groups: Sequence[Sequence[int]]) -> list[Ints]:
        """For each group of pools, the digests, from the first on, whose pages a request can begin with now: by their
        numbers in the index."""
        numbers = self.index.find(digests)
        hits = [numbers[:known] for known in self.known(digests, groups)]
        if self.dcp_size == 1 or not self.slots:
            return hits
        return [
            some[: min(self.pools[pool].placed(some) for pool in pools)]
            for some, pools in zip(hits, groups, strict=True)
        ]

    def begin(
        self,
        request: Request,
        pools: Sequence[int],
        numbers: Ints,
        count: int,
        make_room: Callable[[int, Ints], Ints] | None = None,
    ) -> Counter[int]:
        """Gives a request its first ``count`` pages in all pools of its group, which begin with those of digests
        (:meth:`usable`), which at least one of them has; the caller has checked that enough are free. Returns, by pool,
        the number of pages that it has to fetch. ``make_room``: see :meth:`.PagePool.begin`."""
        absent: dict[int, list[int]] = {}  # by page: the pools that lack it
        held: dict[int, array[int]] = {}
        for pool in pools:
            its = self.pools[pool]
            if len(numbers) or make_room is not None:
                held[pool], missing = its.begin(numbers, count, make_room)
            else:
                held[pool], missing = its.fresh(count), []
            self._give(request, pool, held[pool])
            for index in missing:
                absent.setdefault(index, []).append(pool)
        fetches: deque[Fetch] = deque()
        for index in sorted(absent):
            sources = [pool for pool in pools if pool not in absent[index]]
            for number, pool in enumerate(absent[index]):
                source = sources[(index // self.dcp_size + number) % len(sources)]
                ranks = (one * self.dcp_size + held[one][index] % self.dcp_size for one in (source, pool))
                fetches.append(Fetch(index, self.index.digests[numbers[index]], *ranks))
        if fetches:
            self._fetches[request] = fetches
        return Counter(fetch.rank // self.dcp_size for fetch in fetches)

    def fetching(self, request: Request) -> Sequence[Fetch]:
        return self._fetches.get(request, ())

    def fetched(self, request: Request, fetches: Sequence[Fetch]) -> None:
        """Records that a step with a request's first fetches has been launched: others find these pages now."""
        waiting = self._fetches.get(request)
        if not fetches or waiting is None:
            return
        for fetch in fetches:
            waiting.popleft()
            pool = fetch.rank // self.dcp_size
            page = np.array(self._held[request][pool][fetch.number : fetch.number + 1], np.int64)
            self.pools[pool].name(page, self.index.make([fetch.digest]))
        if not waiting:
            del self._fetches[request]

    def moves(self, chunks: Sequence[Chunk]) -> PageMoves:
        """What this rank copies, sends and receives before it computes these chunks; the next call has new copies."""
        rank, size = self._rank, self.dcp_size
        copies = [
            PageCopy(to_host, page // size, slot // size)
            for to_host, pages, slots in self.pools[rank // size].copies
            for page, slot in zip(pages.tolist(), slots.tolist(), strict=True)
            if page % size == rank % size
        ]
        for pool in self.pools if self.slots or self.spilled else ():
            pool.copies = []  # the other ranks make their own
        own = [chunk for chunk in chunks if chunk.fetches and rank in chunk.ranks]
        ranks = own[0].ranks if own else range(0)
        moves = PageMoves(copies, [[] for _ in ranks], [[] for _ in ranks], bool(own))
        for chunk in own:
            first, pages = chunk.ranks[0], chunk.request.pages
            for fetch in chunk.fetches:
                if fetch.source == rank:
                    moves.sends[fetch.rank - first].append(pages[fetch.number] // size)
                if fetch.rank == rank:
                    moves.receives[fetch.source - first].append(pages[fetch.number] // size)
        return moves

    def name(self, request: Request, digests: Sequence[bytes], first: int) -> None:
        """Records the digests of a request's complete pages from page ``first`` on."""
        held = self._held.get(request, {})
        numbers = self.index.make(digests) if held else np.empty(0, np.int64)
        for pool, pages in held.items():
            self.pools[pool].name(np.array(pages[first : first + len(digests)], np.int64), numbers)

    def release(self, request: Request, pools: Iterable[int] | None = None, forget_from: int | None = None) -> None:
        """Takes back all pages of a request: in these ``pools`` only, or in all, and it waits for no fetches any more.
        ``forget_from``: forgets the digests of its pages from this one on, as their rows may be wrong."""
        held = self._held.get(request, {})
        for pool in list(held) if pools is None else pools:
            pages = np.array(held.pop(pool), np.int64)
            if forget_from is not None:
                self.pools[pool].forget(pages[forget_from:])
            self.pools[pool].release(pages)
            if pool == self._rank // self.dcp_size:
                request.pages = ()
        if pools is None:
            if self._held.pop(request, None) is not None and self.spilled:
                self.free_sets[request.owner // self.dcp_size].append(request.hot_set)
            self._fetches.pop(request, None)

    def enter(self, request: Request) -> None:
        """Gives a request that has its first pages a set of hot rows in its owner's pool."""
        request.hot_set = self.free_sets[request.owner // self.dcp_size].pop()

    def first_pages(self, request: Request, pool: int, count: int) -> Ints:
        return np.array(self._held[request][pool][:count], np.int64)

    def spill(self, request: Request, pool: int, first: int, limit: int) -> int:
        """Spills at most ``limit`` of a request's ``first`` first pages in a pool; returns how many."""
        pages = self.first_pages(request, pool, first)
        moved = self.pools[pool].spill(pages, limit)
        if spilled := int((moved != pages).sum()):
            self._held[request][pool] = new = as_array(moved) + self._held[request][pool][first:]
            if pool == self._rank // self.dcp_size:
                request.pages = new  # another array, see BlockTables.rows; steps in flight have the one before
        return spilled

    def _give(self, request: Request, pool: int, pages: array[int]) -> None:
        of_request = self._held.setdefault(request, {})
        if pool in of_request:
            of_request[pool].extend(pages)
            return
        of_request[pool] = pages
        if pool == self._rank // self.dcp_size:
            request.pages = pages  # the same array as long as it holds pages, see BlockTables.rows


class PrefixCache:
    """Pages are named during the prefill, when their rows are complete, and those of the output when the request ends
    or is preempted. While a prompt is prefilled, all pools of its context-parallel group hold its pages, later its
    owner's does; the pages of the others stay cached. A request uses the pages that any of them has.

    Attributes:
        lookahead: number of tokens after a page that its rows depend on; to be changed only before a :meth:`reset`.
        least_computed: number of last tokens of a request that are always computed.
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
        if self._enabled and request.digests is None:
            request.digests = PageDigests(self._page_size, self.lookahead, request.cache_salt, request.page_digests)
            self.digests(request)  # those that its caller has not made

    def usable(self, request: Request) -> list[bytes]:
        """Digests of the first pages of a waiting request, which it need not compute: all but its last tokens, and the
        tokens before those whose log-probabilities it still wants."""
        if request.digests is None or not request.reads_prefix_cache:
            return []
        tokens = request.num_prefill_tokens - self.least_computed
        if request.prompt_logprobs is not None and len(request.prompt_logprobs) < len(request.prompt):
            tokens = min(tokens, len(request.prompt_logprobs) - 1)
        return self.digests(request)[: max(0, tokens) // self._page_size]

    def waits(self, request: Request, usable: list[bytes], prefilling: Iterable[Request]) -> bool:
        """Whether the prefill of a request before it, by priority and arrival, will compute at least half of what this
        request still has to compute, or fetches pages that it would fetch too: so the first never waits."""
        for other in prefilling:
            if other.digests is None or other.order >= request.order:
                continue
            common = _count_equal(other.digests.values, usable)
            if any(fetch.number < common for fetch in self._ledger.fetching(other)):
                return True
            gained = (common - other.num_named_pages) * self._page_size
            if gained > 0 and 2 * gained >= request.num_prefill_tokens - other.num_named_pages * self._page_size:
                return True
        return False

    def admitted(self, request: Request, pages: int) -> None:
        request.num_named_pages = request.num_found_pages = pages
        request.num_computed_tokens = pages * self._page_size
        if request.num_cached_tokens is None:
            request.num_cached_tokens, request.admitted_at = request.num_computed_tokens, time.perf_counter()
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
        """Forgets all pages, also those in host memory; requests keep the pages that they hold."""
        for pool in self._ledger.pools:
            pool.evict_all()
        self._ledger.index.clear()
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
