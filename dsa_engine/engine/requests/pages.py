"""Pages of the caches: which ones each request holds on every rank, and how many it needs."""

from __future__ import annotations

from dataclasses import dataclass

from dsa_engine.engine.requests.request import Request
from dsa_engine.errors import CapacityError
from dsa_engine.kernels.runtime.integers import cdiv


def pages_for(tokens: int, page_size: int) -> int:
    """Number of pages that ``tokens`` tokens fill."""
    return cdiv(tokens, page_size)


class PageAllocator:
    """Hands out page numbers, the lowest first, and takes them back; returned pages are used again first."""

    def __init__(self, pages: int):
        self._free = list(range(pages - 1, -1, -1))

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """Hands out ``count`` pages; the caller has checked that so many are free."""
        if count > len(self._free):
            raise RuntimeError(f"{count} pages asked for, {len(self._free)} are free")
        return [self._free.pop() for _ in range(count)]

    def give_back(self, pages: list[int]) -> None:
        self._free += reversed(pages)


class PageLedger:
    """Counts the pages that every request holds on every rank, and gives requests their page numbers on this rank.

    All ranks have the same counts, as all take the same decisions; the page numbers go to ``Request.pages``.

    Args:
        rank, world_size: this rank, and the number of ranks.
        pages: pages of the cache, the same on every rank.
    """

    def __init__(self, rank: int, world_size: int, pages: int):
        self.pages = pages
        self._rank = rank
        self._free = [pages] * world_size
        self._held: list[dict[Request, int]] = [{} for _ in range(world_size)]
        self._allocator = PageAllocator(pages)

    @property
    def free(self) -> list[int]:
        """Free pages of every rank."""
        return list(self._free)

    @property
    def own_free(self) -> int:
        """Number of pages that the allocator of this rank can hand out; equals ``free[rank]``."""
        return self._allocator.free

    def held(self, request: Request, rank: int) -> int:
        """Number of pages that a request holds on a rank."""
        return self._held[rank].get(request, 0)

    def holders(self, rank: int) -> list[Request]:
        """Requests that hold pages on a rank."""
        return list(self._held[rank])

    def take(self, request: Request, rank: int, count: int) -> None:
        """Gives a request ``count`` more pages on a rank; the caller has checked that so many are free."""
        if count > self._free[rank]:
            raise RuntimeError(f"{count} pages asked for on rank {rank}, {self._free[rank]} are free")
        if rank == self._rank:
            request.pages += self._allocator.take(count)
        self._free[rank] -= count
        self._held[rank][request] = self.held(request, rank) + count

    def release(self, request: Request, rank: int) -> None:
        """Takes back all pages of a request on a rank, if it holds any."""
        self._free[rank] += self._held[rank].pop(request, 0)
        if rank == self._rank:
            self._allocator.give_back(request.pages)
            request.pages = []

    def release_all(self, request: Request) -> None:
        """Takes back all pages of a request on all ranks."""
        for rank in range(len(self._free)):
            self.release(request, rank)


@dataclass(frozen=True)
class Capacity:
    """Size of the caches of all ranks, and what fits in them when they are empty.

    Attributes:
        world_size, cp_size: number of ranks, and of ranks in a context-parallel group.
        pages: pages on each rank.
        page_size: tokens in a page.
    """

    world_size: int
    cp_size: int
    pages: int
    page_size: int

    def max_pages(self, prompt_len: int, max_tokens: int) -> int:
        """Maximum number of pages that a request may hold; the last sampled token never enters the cache."""
        return pages_for(prompt_len + max_tokens - 1, self.page_size)

    def with_drafts(self, request: Request, num_drafts: int) -> int:
        """Number of pages for a request's next step: for its tokens, the drafts that the step verifies, and the drafts
        that it makes. The last new draft needs no row."""
        to_verify = num_drafts if request.prefilled else 0
        wanted = len(request) + to_verify + max(0, num_drafts - 1)
        limit = len(request.prompt) + request.max_tokens - 1
        return pages_for(max(len(request) - request.num_unverified, min(wanted, limit)), self.page_size)

    def check(self, prompt_len: int, max_tokens: int) -> None:
        """Checks that a request of this size can run, if alone.

        Raises:
            CapacityError: it cannot; the message says how many pages it needs and how many there are.
        """
        self.require("this request", self.max_pages(prompt_len, max_tokens), prompt_len, max_tokens)

    def require(self, what: str, need: int, prompt_len: int, max_tokens: int) -> None:
        """Raises ``CapacityError`` if ``what``, requests of this size, need more pages than a rank has."""
        if need > self.pages:
            raise CapacityError(
                f"the cache is too small for {what}: {prompt_len} prompt tokens and up to {max_tokens} new ones "
                f"({prompt_len + max_tokens} in all) need {need} pages of {self.page_size} tokens, the cache "
                f"has {self.pages}; raise cache_memory by a factor of {need / self.pages:.2f}, or take fewer requests "
                "or tokens"
            )
