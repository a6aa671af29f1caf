"""Pages of the caches on one rank: free, held by requests, or cached for requests to come.

A full page is known by the digest of its tokens and of all tokens before it (``digests.py``). Requests whose
prompts begin alike hold the same pages. A page that no request holds keeps its digest and its rows until it is needed.
With host memory behind the device, its rows are then copied there, and come back when a request begins with them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from dsa_engine.engine.cache.host_slots import HostSlots
from dsa_engine.engine.cache.moves import PageCopy


class PagePool:
    """Pages of one rank.

    Free pages are used before cached ones, the lowest first and returned ones again first. Cached pages are evicted in
    the order of their last use.

    Attributes:
        host: the pages in host memory.
        copies: copies between both that the next step begins with, in their order.
        dropped: called with the digest of a page that is no longer on the device; None: it is not needed.
    """

    dropped: Callable[[bytes], None] | None = None

    def __init__(self, pages: int, slots: int = 0):
        self.host = HostSlots(slots)
        self.copies: list[PageCopy] = []
        self._free = list(range(pages - 1, -1, -1))
        self._holders: dict[int, int] = {}  # number of requests that hold a page
        self._page_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()  # pages with a digest and without a holder, oldest first

    def __contains__(self, digest: bytes) -> bool:
        """Whether the page with this digest is here, on the device or in host memory."""
        return digest in self._page_of or digest in self.host

    @property
    def free(self) -> int:
        """Number of pages that :meth:`take` can hand out: free and cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def cached(self) -> int:
        """Number of pages that no request holds, with rows that may be used again."""
        return len(self._cached)

    def take(self, count: int, locked: frozenset[bytes] = frozenset()) -> list[int]:
        """Hands out ``count`` pages; the caller has checked that so many are free. What they held is copied to host
        memory, if there is any.

        Args:
            locked: digests of copies in host memory that must stay.
        """
        if count > self.free:
            raise RuntimeError(f"{count} pages asked for, {self.free} are free")
        pages = [self._free.pop() for _ in range(min(count, len(self._free)))]
        while len(pages) < count:
            page, _ = self._cached.popitem(last=False)
            digest = self._digest_of.pop(page)
            del self._page_of[digest]
            if self.dropped is not None:
                self.dropped(digest)
            if (slot := self.host.put(digest, locked)) is not None:
                self.copies.append(PageCopy(True, page, slot))
            pages.append(page)
        self._holders |= dict.fromkeys(pages, 1)
        return pages

    def count_held(self, digests: Iterable[bytes]) -> int:
        """Number of digests whose pages some request holds."""
        return sum(self._page_of.get(digest) in self._holders for digest in digests)

    def begin(self, digests: Sequence[bytes], count: int) -> tuple[list[int], list[int]]:
        """Hands out a request's first pages; the caller has checked that enough are free.

        Args:
            digests: of its first pages, as far as they are known.
            count: number of its pages, these and further ones.

        Returns:
            the pages, and the indices of those among ``digests`` whose rows are not here.
        """
        known = [self._page_of.get(digest) for digest in digests]
        for page in known:
            if page is not None:  # held before any page is taken, so that none of them is evicted
                self._cached.pop(page, None)
                self._holders[page] = self._holders.get(page, 0) + 1
        absent = [index for index, page in enumerate(known) if page is None]
        in_host = {index for index in absent if digests[index] in self.host}
        locked = frozenset(digests[index] for index in in_host)
        new = iter(self.take(len(absent) + count - len(digests), locked))
        pages = [next(new) if page is None else page for page in known]
        for index in sorted(in_host):
            self.copies.append(PageCopy(False, pages[index], self.host.use(digests[index])))
            self.name(pages[index : index + 1], digests[index : index + 1])
        return pages + list(new), [index for index in absent if index not in in_host]

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
                if self.dropped is not None:
                    self.dropped(digest)

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
        """Frees all cached pages and all host memory, and forgets the digests of held pages."""
        self._free += reversed(self._cached)
        self._cached.clear()
        self._page_of.clear()
        self._digest_of.clear()
        self.host.clear()
