"""Pages of all ranks: which request holds which, and what ranks copy and send to each other for it.

All ranks have the same ledger, as all take the same decisions; so each knows what the others have, without messages.

A request begins with the pages that any rank of its context-parallel group has. A rank that lacks one gets it from a
rank that has it: a fetch. Fetches take place at the beginning of prefill steps, before the step computes; a step's
number of them is limited, as their buffers are.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from itertools import islice

from dsa_engine.engine.cache.moves import PageMoves
from dsa_engine.engine.cache.pool import PagePool
from dsa_engine.engine.requests.request import Chunk, Fetch, Request


class PageLedger:
    """The pages that every request holds on every rank; ``Request.pages`` are those of this rank.

    Args:
        pages: pages of the cache, the same on every rank.
        slots: pages in host memory behind it, the same on every rank.
        max_fetched: maximum number of pages that a rank sends, and of pages that it receives, in a step.

    Attributes:
        pools: the pages of every rank.
        fetched_pages: number of pages that ranks have sent to others so far.
    """

    def __init__(self, rank: int, world_size: int, pages: int, slots: int = 0, max_fetched: int = 1):
        self.pages, self.slots = pages, slots
        self._rank = rank
        self.max_fetched = max_fetched
        self.pools = [PagePool(pages, slots) for _ in range(world_size)]
        self.fetched_pages = 0
        self._held: list[dict[Request, list[int]]] = [{} for _ in range(world_size)]
        self._fetches: dict[Request, deque[Fetch]] = {}  # by request whose rows are not all there

    @property
    def free(self) -> list[int]:
        """Free pages of every rank, cached ones included."""
        return [pool.free for pool in self.pools]

    @property
    def cached(self) -> list[int]:
        """Pages of every rank that no request holds, with rows that may be used again."""
        return [pool.cached for pool in self.pools]

    def held(self, request: Request, rank: int) -> int:
        """Number of pages that a request holds on a rank."""
        return len(self._held[rank].get(request, ()))

    def holders(self, rank: int) -> list[Request]:
        """Requests that hold pages on a rank."""
        return list(self._held[rank])

    def take(self, request: Request, rank: int, count: int) -> None:
        """Gives a request ``count`` more pages on a rank; the caller has checked that so many are free."""
        pool = self.pools[rank]
        if count > pool.free:
            raise RuntimeError(f"{count} pages asked for on rank {rank}, {pool.free} are free")
        self._give(request, rank, pool.take(count))

    def known(self, digests: Sequence[bytes], ranks: Iterable[int]) -> int:
        """Number of digests, from the first on, whose pages are on any of these ranks."""
        pools = [self.pools[rank] for rank in ranks]
        for number, digest in enumerate(digests):
            if not any(digest in pool for pool in pools):
                return number
        return len(digests)

    def fits(self, digests: Sequence[bytes], rank: int, pages: int, room: int) -> bool:
        """Whether a request of ``pages`` pages, which begins with those of ``digests``, takes at most ``room`` free
        pages of a rank."""
        return pages <= room or pages - self.pools[rank].count_held(digests) <= room

    def begin(self, request: Request, ranks: Sequence[int], digests: Sequence[bytes], count: int) -> Counter[int]:
        """Gives a request its first pages on all ranks of its group; the caller has checked that enough are free.

        Args:
            digests: of its first pages, which at least one of the ranks has.
            count: number of its pages, these and further ones.

        Returns:
            by rank, the number of pages that it has to fetch.
        """
        absent: dict[int, list[int]] = {}  # by page: the ranks that lack it
        for rank in ranks:
            pages, missing = self.pools[rank].begin(digests, count)
            self._give(request, rank, pages)
            for index in missing:
                absent.setdefault(index, []).append(rank)
        fetches: deque[Fetch] = deque()
        for index in sorted(absent):
            sources = [rank for rank in ranks if rank not in absent[index]]
            for number, rank in enumerate(absent[index]):
                fetches.append(Fetch(index, digests[index], sources[(index + number) % len(sources)], rank))
        if fetches:
            self._fetches[request] = fetches
        return Counter(fetch.rank for fetch in fetches)

    def fetching(self, request: Request) -> Iterable[Fetch]:
        """The fetches that a request still waits for."""
        return self._fetches.get(request, ())

    def next_fetches(self, request: Request, taken: Sequence[Fetch]) -> tuple[Fetch, ...]:
        """A request's next fetches, as many as fit in a step that already has those of ``taken``."""
        sent, received = [0] * len(self.pools), [0] * len(self.pools)
        for fetch in taken:
            sent[fetch.source] += 1
            received[fetch.rank] += 1
        count, waiting = 0, self._fetches.get(request, ())
        for fetch in waiting:
            sent[fetch.source] += 1
            received[fetch.rank] += 1
            if max(sent[fetch.source], received[fetch.rank]) > self.max_fetched:
                break
            count += 1
        return tuple(islice(waiting, count))

    def fetched(self, request: Request, fetches: Sequence[Fetch]) -> None:
        """Records that a step with a request's first fetches has been launched: others find these pages now."""
        waiting = self._fetches.get(request)
        if not fetches or waiting is None:
            return
        self.fetched_pages += len(fetches)
        for fetch in fetches:
            waiting.popleft()
            page = self._held[fetch.rank][request][fetch.number]
            self.pools[fetch.rank].name([page], [fetch.digest])
        if not waiting:
            del self._fetches[request]

    def moves(self, chunks: Sequence[Chunk]) -> PageMoves:
        """What this rank copies, sends and receives before it computes these chunks; the next call has new copies."""
        copies = self.pools[self._rank].copies
        for pool in self.pools:
            pool.copies = []  # the other ranks make their own
        own = [chunk for chunk in chunks if chunk.fetches and self._rank in chunk.ranks]
        size, held = len(own[0].ranks) if own else 0, self._held[self._rank]
        moves = PageMoves(copies, [[] for _ in range(size)], [[] for _ in range(size)], bool(own))
        for chunk in own:
            first = chunk.ranks[0]
            for fetch in chunk.fetches:
                if fetch.source == self._rank:
                    moves.sends[fetch.rank - first].append(held[chunk.request][fetch.number])
                if fetch.rank == self._rank:
                    moves.receives[fetch.source - first].append(held[chunk.request][fetch.number])
        return moves

    def name(self, request: Request, digests: Sequence[bytes], first: int) -> None:
        """Records the digests of a request's complete pages from page ``first`` on, on every rank that holds them."""
        last = first + len(digests)
        for pool, held in zip(self.pools, self._held, strict=True):
            if pages := held.get(request):
                pool.name(pages[first:last], digests)

    def release(self, request: Request, rank: int) -> None:
        """Takes back all pages of a request on a rank, if it holds any."""
        self.pools[rank].release(self._held[rank].pop(request, []))
        if rank == self._rank:
            request.pages = []

    def release_all(self, request: Request, *, forget_from: int | None = None) -> None:
        """Takes back all pages of a request on all ranks.

        Args:
            forget_from: forgets the digests of its pages from this one on, as their rows may be wrong.
        """
        self._fetches.pop(request, None)
        for rank, pool in enumerate(self.pools):
            if forget_from is not None:
                pool.forget(self._held[rank].get(request, [])[forget_from:])
            self.release(request, rank)

    def evict_all(self) -> None:
        """Frees all cached pages and host memory, and forgets the digests of held pages."""
        for pool in self.pools:
            pool.evict_all()

    def _give(self, request: Request, rank: int, pages: list[int]) -> None:
        held = self._held[rank].setdefault(request, [])
        held += pages
        if rank == self._rank:
            request.pages = held  # the same list as long as it holds pages, see BlockTables.rows
