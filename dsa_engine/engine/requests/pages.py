"""Which pages of the caches each request holds on every rank, how many it needs, and whether there are as many."""

from __future__ import annotations

from dataclasses import dataclass

from dsa_engine.engine.requests.request import Request
from dsa_engine.errors import CapacityError
from dsa_engine.kernels.runtime.integers import cdiv


def pages_for(tokens: int, page_size: int) -> int:
    """Pages that ``tokens`` tokens fill."""
    return cdiv(tokens, page_size)


class PageAllocator:
    """Hands out page numbers, lowest first when new, and takes them back."""

    def __init__(self, pages: int):
        self._free = list(range(pages - 1, -1, -1))

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """``count`` pages; the caller has made sure that there are as many."""
        if count > len(self._free):
            raise RuntimeError(f"{count} pages asked for, {len(self._free)} are free")
        return [self._free.pop() for _ in range(count)]

    def give_back(self, pages: list[int]) -> None:
        self._free += reversed(pages)


class PageLedger:
    """How many pages every request holds on every rank, and the numbers of those on this rank.

    All ranks keep the same counts, as all take the same decisions; the numbers go to ``Request.pages``.

    Args:
        rank, world_size: this rank's place.
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
        """Page numbers that this rank has left to hand out: as many as its count in ``free``."""
        return self._allocator.free

    def held(self, request: Request, rank: int) -> int:
        """Pages of a request on a rank."""
        return self._held[rank].get(request, 0)

    def holders(self, rank: int) -> list[Request]:
        """The requests that hold pages on a rank."""
        return list(self._held[rank])

    def take(self, request: Request, rank: int, count: int) -> None:
        """Gives a request ``count`` more pages on a rank; the caller has made sure that there are as many."""
        if count > self._free[rank]:
            raise RuntimeError(f"{count} pages asked for on rank {rank}, {self._free[rank]} are free")
        if rank == self._rank:
            request.pages += self._allocator.take(count)
        self._free[rank] -= count
        self._held[rank][request] = self.held(request, rank) + count

    def release(self, request: Request, rank: int) -> None:
        """Takes back all pages of a request on a rank, none where it holds none."""
        self._free[rank] += self._held[rank].pop(request, 0)
        if rank == self._rank:
            self._allocator.give_back(request.pages)
            request.pages = []

    def release_all(self, request: Request) -> None:
        """Takes back all pages of a request."""
        for rank in range(len(self._free)):
            self.release(request, rank)


@dataclass(frozen=True)
class Capacity:
    """The caches of all ranks, while nobody holds a page.

    Attributes:
        world_size, cp_size: ranks, and those of a context-parallel group.
        pages: of each rank.
        page_size: tokens a page.
    """

    world_size: int
    cp_size: int
    pages: int
    page_size: int

    def most(self, prompt_len: int, max_tokens: int) -> int:
        """Pages that a request may come to hold; the last token that is sampled never enters the cache."""
        return pages_for(prompt_len + max_tokens - 1, self.page_size)

    def with_drafts(self, request: Request, num_drafts: int) -> int:
        """Pages of its tokens, of the drafts that its next step verifies, and of those that this step then makes: the
        module's rows up to the one before the last draft."""
        own = num_drafts if request.prefilled else 0
        more = own + max(0, num_drafts - 1)
        most = len(request.prompt) + request.max_tokens - 1
        return pages_for(max(len(request) - request.num_unverified, min(len(request) + more, most)), self.page_size)

    def check(self, prompt_len: int, max_tokens: int) -> None:
        """Whether a request of this size can run, alone at least.

        Raises:
            CapacityError: it cannot; says what it needs and what there is.
        """
        self.require("this request", self.most(prompt_len, max_tokens), prompt_len, max_tokens)

    def require(self, what: str, need: int, prompt_len: int, max_tokens: int) -> None:
        """Raises ``CapacityError`` if ``what``, requests of this size, need more pages than a rank has."""
        if need > self.pages:
            raise CapacityError(
                f"the cache is too small for {what}: {prompt_len} prompt tokens and up to {max_tokens} new ones "
                f"({prompt_len + max_tokens} in all) need {need} pages of {self.page_size} tokens, the cache "
                f"has {self.pages}; raise cache_memory by a factor of {need / self.pages:.2f}, or take fewer requests "
                "or tokens"
            )
