"""Pages of all ranks: which request holds which, and what ranks copy and send to each other for it.

All ranks have the same ledger, as all take the same decisions; so each knows what the others have, without messages.

A request begins with the pages that any rank of its context-parallel group has. A rank that lacks one gets it from a
rank that has it: a fetch. Fetches take place at the beginning of prefill steps, before the step computes; a step's
number of them is limited, as their buffers are.
"""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice

from dsa_engine.engine.cache.pool import PageCopy, PageIndex, PagePool
from dsa_engine.engine.requests.request import Chunk, Fetch, Request


@dataclass
class PageMoves:
    """Everything that one step moves on this rank before its layers read pages.

    Attributes:
        copies: take effect in this order; pages and slots may occur several times.
        sends: for each rank of the context-parallel group, the pages to send to it, as they are after the copies. A
            page may occur several times.
        receives: for each rank of the group, the pages to fill with what it sends, in the same order. A page occurs
            once.
        exchanges: whether any rank of the group sends; then all of them take part in one collective a layer.
    """

    copies: list[PageCopy] = field(default_factory=list)
    sends: list[list[int]] = field(default_factory=list)
    receives: list[list[int]] = field(default_factory=list)
    exchanges: bool = False


class PageLedger:
    """The pages that every request holds on every rank; ``Request.pages`` are those of this rank.

    Args:
        pages: pages of the cache, the same on every rank.
        slots: pages in host memory, the same on every rank.
        max_fetched: maximum number of pages that a rank sends, and of pages that it receives, in a step.
        forgotten: called with the digest of a page that no rank has any more.

    Attributes:
        pools: the pages of every rank.
        index: the ranks that have each page.
        fetched_pages: number of pages that ranks have sent to others so far.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        pages: int,
        slots: int = 0,
        max_fetched: int = 1,
        forgotten: Callable[[bytes], None] | None = None,
    ):
        self.pages, self.slots = pages, slots
        self._rank = rank
        self.max_fetched = max_fetched
        self.index = PageIndex(forgotten)
        self.pools = [PagePool(pages, slots, self.index, number) for number in range(world_size)]
        self.fetched_pages = 0
        self._held: dict[Request, dict[int, array[int]]] = {}  # by request and rank
        self._fetches: dict[Request, deque[Fetch]] = {}  # by request whose rows are not all there

    @property
    def free(self) -> list[int]:
        """Free pages of every rank, cached ones included."""
        return [pool.free for pool in self.pools]

    def held(self, request: Request, rank: int) -> int:
        """Number of pages that a request holds on a rank."""
        return len(self._held.get(request, {}).get(rank, ()))

    def holders(self, rank: int) -> list[Request]:
        """Requests that hold pages on a rank."""
        return [request for request, held in self._held.items() if rank in held]

    def take(self, request: Request, rank: int, count: int) -> None:
        """Gives a request ``count`` more pages on a rank.

        Raises:
            RuntimeError: fewer are free.
        """
        self._give(request, rank, self.pools[rank].take(count))

    def give(self, request: Request, pages: int) -> bool:
        """Gives a request that decodes ``pages`` more pages on its owner; returns whether these were free."""
        owner = request.owner
        pool, held = self.pools[owner], self._held[request][owner]
        if pages == 1 and pool.unused:  # as a rule
            held.append(pool.unused.pop())
            return True
        if pool.free < pages:
            return False
        held.extend(pool.take(pages))
        return True

    def known(self, digests: Sequence[bytes], groups: Sequence[Sequence[int]]) -> list[int]:
        """For each group of ranks, the number of digests, from the first on, whose pages any of the ranks has."""
        counts, ranks_of = [len(digests)] * len(groups), self.index.ranks
        having = {number: sum(1 << rank for rank in ranks) for number, ranks in enumerate(groups)}
        for count, digest in enumerate(digests):
            ranks = ranks_of.get(digest, 0)
            for number in [number for number, group in having.items() if not group & ranks]:
                counts[number] = count
                del having[number]
            if not having:
                break
        return counts

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
            page = self._held[request][fetch.rank][fetch.number]
            self.pools[fetch.rank].name([page], [fetch.digest])
            self.index.add(fetch.digest, 1 << fetch.rank)
        if not waiting:
            del self._fetches[request]

    def moves(self, chunks: Sequence[Chunk]) -> PageMoves:
        """What this rank copies, sends and receives before it computes these chunks; the next call has new copies."""
        copies = self.pools[self._rank].copies
        for pool in self.pools if self.slots else ():
            pool.copies = []  # the other ranks make their own
        own = [chunk for chunk in chunks if chunk.fetches and self._rank in chunk.ranks]
        size = len(own[0].ranks) if own else 0
        moves = PageMoves(copies, [[] for _ in range(size)], [[] for _ in range(size)], bool(own))
        for chunk in own:
            first, pages = chunk.ranks[0], self._held[chunk.request][self._rank]
            for fetch in chunk.fetches:
                if fetch.source == self._rank:
                    moves.sends[fetch.rank - first].append(pages[fetch.number])
                if fetch.rank == self._rank:
                    moves.receives[fetch.source - first].append(pages[fetch.number])
        return moves

    def name(self, request: Request, digests: Sequence[bytes], first: int) -> None:
        """Records the digests of a request's complete pages from page ``first`` on, on every rank that holds them."""
        last, ranks = first + len(digests), 0
        for rank, pages in self._held.get(request, {}).items():
            self.pools[rank].name(pages[first:last], digests)
            ranks |= 1 << rank
        ranks_of = self.index.ranks
        for digest in digests if ranks else ():
            ranks_of[digest] = ranks_of.get(digest, 0) | ranks

    def release(self, request: Request, ranks: Iterable[int] | None = None, forget_from: int | None = None) -> None:
        """Takes back all pages of a request.

        Args:
            ranks: on these ranks only; default: on all ranks, and it waits for no fetches any more.
            forget_from: forgets the digests of its pages from this one on, as their rows may be wrong.
        """
        held = self._held.get(request, {})
        for rank in list(held) if ranks is None else ranks:
            pages = held.pop(rank)
            if forget_from is not None:
                self.pools[rank].forget(pages[forget_from:])
            self.pools[rank].release(pages)
            if rank == self._rank:
                request.pages = ()
        if ranks is None:
            self._held.pop(request, None)
            self._fetches.pop(request, None)

    def evict_all(self) -> None:
        """Frees all cached pages and host memory, and forgets the digests of held pages."""
        for pool in self.pools:
            pool.evict_all()
        self.index.ranks.clear()

    def _give(self, request: Request, rank: int, pages: array[int]) -> None:
        of_request = self._held.setdefault(request, {})
        if rank in of_request:
            of_request[rank].extend(pages)
            return
        of_request[rank] = pages
        if rank == self._rank:
            request.pages = pages  # the same array as long as it holds pages, see BlockTables.rows
