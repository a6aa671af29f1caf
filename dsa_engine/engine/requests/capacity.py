"""Size of the caches of all ranks, and the pages that a request needs."""

from __future__ import annotations

from dataclasses import dataclass

from dsa_engine.engine.requests.request import Request
from dsa_engine.errors import CapacityError
from dsa_engine.kernels.runtime.integers import cdiv


def pages_for(tokens: int, page_size: int) -> int:
    """Number of pages that ``tokens`` tokens fill."""
    return cdiv(tokens, page_size)


@dataclass(frozen=True)
class Capacity:
    """Size of the caches of all ranks, and what fits in them when they are empty."""

    world_size: int
    cp_size: int
    pages: int
    page_size: int
    fewest: int | None = None  # pages of the smallest cache of the run, where a request passes through two parts of it

    @property
    def limit(self) -> int:
        """Maximum number of pages of a request."""
        return self.pages if self.fewest is None else self.fewest

    def max_pages(self, prompt_len: int, max_tokens: int) -> int:
        """Maximum number of pages that a request may hold; the last sampled token never enters the cache."""
        return pages_for(prompt_len + max_tokens - 1, self.page_size)

    def first_pages(self, request: Request, num_drafts: int) -> int:
        """Number of pages that a request enters with: for its tokens, and the drafts that the last step of its prefill
        makes. The last of them needs no row."""
        limit = len(request.prompt) + request.max_tokens - 1
        return pages_for(max(len(request), min(len(request) + max(0, num_drafts - 1), limit)), self.page_size)

    def check(self, prompt_len: int, max_tokens: int) -> None:
        """Checks that a request of this size can run, if alone.

        Raises:
            CapacityError: it cannot; the message says how many pages it needs and how many there are.
        """
        self.require("this request", self.max_pages(prompt_len, max_tokens), prompt_len, max_tokens)

    def require(self, what: str, need: int, prompt_len: int, max_tokens: int) -> None:
        """Raises ``CapacityError`` if ``what``, requests of this size, need more pages than a rank has."""
        if need > self.limit:
            raise CapacityError(
                f"the cache is too small for {what}: {prompt_len} prompt tokens and up to {max_tokens} new ones "
                f"({prompt_len + max_tokens} in all) need {need} pages of {self.page_size} tokens, the cache "
                f"has {self.limit}; raise cache_memory by a factor of {need / self.limit:.2f}, or take fewer requests "
                "or tokens"
            )
