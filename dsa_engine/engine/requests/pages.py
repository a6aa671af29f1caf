"""Pages of the caches on every rank: free, held by requests, or cached for requests to come.

A full page is known by the digest of its tokens and of all tokens before it (``page_digests.py``). Requests whose
prompts begin alike hold the same pages. A page that no request holds keeps its digest and its rows until it is needed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from dsa_engine.engine.requests.request import Request


class PagePool:
    """Pages of one rank.

    Free pages are used before cached ones, the lowest first and returned ones again first. Cached pages are evicted in
    the order of their last use.
    """

    def __init__(self, pages: int):
        self._free = list(range(pages - 1, -1, -1))
        self._holders: dict[int, int] = {}  # number of requests that hold a page
        self._page_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()  # pages with a digest and without a holder, oldest first

    @property
    def free(self) -> int:
        """Number of pages that :meth:`take` can hand out: free and cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def cached(self) -> int:
        """Number of pages that no request holds, with rows that may be used again."""
        return len(self._cached)

    def take(self, count: int) -> list[int]:
        """Hands out ``count`` pages; the caller has checked that so many are free."""
        if count > self.free:
            raise RuntimeError(f"{count} pages asked for, {self.free} are free")
        pages = [self._free.pop() for _ in range(min(count, len(self._free)))]
        while len(pages) < count:
            page, _ = self._cached.popitem(last=False)
            del self._page_of[self._digest_of.pop(page)]
            pages.append(page)
        self._holders |= dict.fromkeys(pages, 1)
        return pages

    def count_known(self, digests: Sequence[bytes]) -> int:
        """Number of digests, from the first on, whose pages are here."""
        for number, digest in enumerate(digests):
            if digest not in self._page_of:
                return number
        return len(digests)

    def count_held(self, digests: Iterable[bytes]) -> int:
        """Number of digests whose pages some request holds."""
        return sum(self._page_of.get(digest) in self._holders for digest in digests)

    def reuse(self, digests: Iterable[bytes]) -> list[int]:
        """Gives the known pages of these digests to one more request."""
        pages = [self._page_of[digest] for digest in digests]
        for page in pages:
            self._cached.pop(page, None)
            self._holders[page] = self._holders.get(page, 0) + 1
        return pages

    def name(self, pages: Iterable[int], digests: Iterable[bytes]) -> None:
        """Records the digests of held pages whose rows are complete. A digest keeps its first page."""
        for page, digest in zip(pages, digests, strict=True):
            if digest not in self._page_of and page not in self._digest_of:
                self._page_of[digest] = page
                self._digest_of[page] = digest

    def forget(self, pages: Iterable[int]) -> None:
        """Removes the digests of held pages: their rows may be wrong."""
        for page in pages:
            if (digest := self._digest_of.pop(page, None)) is not None:
                del self._page_of[digest]

    def release(self, pages: Sequence[int]) -> None:
        """Takes back a request's pages. The last are evicted first: pages are found from the first on."""
        for page in reversed(pages):
            if self._holders[page] > 1:
                self._holders[page] -= 1
                continue
            del self._holders[page]
            if page in self._digest_of:
                self._cached[page] = None
            else:
                self._free.append(page)

    def evict_all(self) -> None:
        """Frees all cached pages, and forgets the digests of held ones."""
        self._free += reversed(self._cached)
        self._cached.clear()
        self._page_of.clear()
        self._digest_of.clear()


class PageLedger:
    """The pages that every request holds on every rank; ``Request.pages`` are those of this rank.

    All ranks have the same ledger, as all take the same decisions; so each knows what the others have, without
    messages.

    Args:
        rank, world_size: this rank, and the number of ranks.
        pages: pages of the cache, the same on every rank.
    """

    def __init__(self, rank: int, world_size: int, pages: int):
        self.pages = pages
        self._rank = rank
        self._pools = [PagePool(pages) for _ in range(world_size)]
        self._held: list[dict[Request, list[int]]] = [{} for _ in range(world_size)]

    @property
    def free(self) -> list[int]:
        """Free pages of every rank, cached ones included."""
        return [pool.free for pool in self._pools]

    @property
    def cached(self) -> list[int]:
        """Pages of every rank that no request holds, with rows that may be used again."""
        return [pool.cached for pool in self._pools]

    def held(self, request: Request, rank: int) -> int:
        """Number of pages that a request holds on a rank."""
        return len(self._held[rank].get(request, ()))

    def holders(self, rank: int) -> list[Request]:
        """Requests that hold pages on a rank."""
        return list(self._held[rank])

    def take(self, request: Request, rank: int, count: int) -> None:
        """Gives a request ``count`` more pages on a rank; the caller has checked that so many are free."""
        pool = self._pools[rank]
        if count > pool.free:
            raise RuntimeError(f"{count} pages asked for on rank {rank}, {pool.free} are free")
        self._give(request, rank, pool.take(count))

    def known(self, digests: Sequence[bytes], ranks: Iterable[int]) -> int:
        """Number of digests, from the first on, whose pages are on all of these ranks."""
        for rank in ranks:
            digests = digests[: self._pools[rank].count_known(digests)]
        return len(digests)

    def needed(self, digests: Sequence[bytes], rank: int, pages: int) -> int:
        """Number of free pages that a request of ``pages`` pages takes, which begins with the known pages of
        ``digests``."""
        return pages - self._pools[rank].count_held(digests)

    def reuse(self, request: Request, rank: int, digests: Iterable[bytes]) -> None:
        """Gives a request without pages the known pages of these digests on a rank."""
        self._give(request, rank, self._pools[rank].reuse(digests))

    def name(self, request: Request, digests: Sequence[bytes], first: int) -> None:
        """Records the digests of a request's complete pages from page ``first`` on, on every rank that holds them."""
        last = first + len(digests)
        for pool, held in zip(self._pools, self._held, strict=True):
            if pages := held.get(request):
                pool.name(pages[first:last], digests)

    def release(self, request: Request, rank: int) -> None:
        """Takes back all pages of a request on a rank, if it holds any."""
        self._pools[rank].release(self._held[rank].pop(request, []))
        if rank == self._rank:
            request.pages = []

    def release_all(self, request: Request, *, forget_from: int | None = None) -> None:
        """Takes back all pages of a request on all ranks.

        Args:
            forget_from: forgets the digests of its pages from this one on, as their rows may be wrong.
        """
        for rank, pool in enumerate(self._pools):
            if forget_from is not None:
                pool.forget(self._held[rank].get(request, [])[forget_from:])
            self.release(request, rank)

    def evict_all(self) -> None:
        """Frees all cached pages, and forgets the digests of held ones."""
        for pool in self._pools:
            pool.evict_all()

    def _give(self, request: Request, rank: int, pages: list[int]) -> None:
        held = self._held[rank].setdefault(request, [])
        held += pages
        if rank == self._rank:
            request.pages = held  # the same list as long as it holds pages, see BlockTables.rows
