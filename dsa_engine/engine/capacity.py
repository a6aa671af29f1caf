"""How many pages requests need, and whether the caches have as many."""

from __future__ import annotations

from dataclasses import dataclass

from dsa_engine.engine.pages import pages_for
from dsa_engine.engine.request import Request
from dsa_engine.errors import CapacityError


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
        verified = num_drafts if request.prefilled else 0
        more = verified + max(0, num_drafts - 1)
        most = len(request.prompt) + request.max_tokens - 1
        return pages_for(max(len(request) - request.uncertain, min(len(request) + more, most)), self.page_size)

    def check(self, prompt_len: int, max_tokens: int) -> None:
        """Whether a request of this size can run, alone at least.

        Raises:
            CapacityError: it cannot; says what it needs and what there is.
        """
        self._check("this request", self.most(prompt_len, max_tokens), prompt_len, max_tokens)

    def check_batch(self, requests: int, prompt_len: int, max_tokens: int, filled: bool = False) -> None:
        """Whether so many requests of this size, divided evenly over the ranks, can run at once without preemption.

        Args:
            filled: they are adopted, not prefilled.

        Raises:
            CapacityError: they cannot; says what a rank needs and what it has.
        """
        each = -(-requests // self.world_size)
        need = each * self.most(prompt_len, max_tokens)
        if requests > 1 and self.cp_size > 1 and not filled:
            need += pages_for(prompt_len, self.page_size)  # of another rank's request, while it is prefilled
        what = f"{requests} such requests at once on {self.world_size} rank(s), {each} on each"
        self._check(what, need, prompt_len, max_tokens)

    def _check(self, what: str, need: int, prompt_len: int, max_tokens: int) -> None:
        if need > self.pages:
            raise CapacityError(
                f"the cache is too small for {what}: {prompt_len} prompt tokens and up to {max_tokens} new ones "
                f"({prompt_len + max_tokens} in all) need {need} pages of {self.page_size} tokens, the cache "
                f"has {self.pages}; raise cache_memory by a factor of {need / self.pages:.2f}, or take fewer requests "
                "or tokens"
            )
