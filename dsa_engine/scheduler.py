"""Which tokens are computed next.

Every rank runs the same scheduler on the same requests and comes to the same decisions, so nothing has to be agreed by
messages. It counts the free pages of all ranks, and hands out the page numbers of its own.

A request is prefilled by the ranks of one context-parallel group, all of which hold its pages meanwhile; then its owner
keeps them and decodes it alone. Its pages for prompt and output are set apart when it is admitted, so that a running
request never waits for memory.
"""

from __future__ import annotations

from collections import deque

from dsa_engine.cache import PageAllocator, pages_for
from dsa_engine.errors import CapacityError
from dsa_engine.sequence import Chunk, Sequence


class Scheduler:
    """Requests in order of arrival: first come, first served; prefill goes before decode.

    Args:
        rank, world_size, cp_size: this rank's place; context-parallel groups are consecutive ranks.
        pages: pages of the cache, the same on every rank.
        page_size: tokens a page.
        max_num_seqs: most requests that run at once.
        max_num_batched_tokens: most tokens a rank prefills in a step.
    """

    def __init__(
        self,
        *,
        rank: int,
        world_size: int,
        cp_size: int,
        pages: int,
        page_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
    ):
        self._rank = rank
        self._cp_size = cp_size
        self._groups = [range(first, first + cp_size) for first in range(0, world_size, cp_size)]
        self._pages = pages
        self._page_size = page_size
        self._max_num_seqs = max_num_seqs
        self._group_tokens = max_num_batched_tokens * cp_size
        self._budget: list[int] = []  # tokens that each group can still take in the step being planned
        self._allocator = PageAllocator(pages)
        self._free = [pages] * world_size
        self._held: dict[int, dict[int, int]] = {}  # sequence id -> rank -> pages
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running)

    @property
    def free_pages(self) -> list[int]:
        """Free pages of every rank."""
        return list(self._free)

    def check(self, prompt_len: int, max_tokens: int, requests: int = 1) -> None:
        """Whether requests of this size can run at the same time.

        Raises:
            CapacityError: not even alone; says what they need and what there is.
        """
        need = requests * self._pages_at_most(prompt_len, max_tokens)
        if need > self._pages:
            what = "this request" if requests == 1 else f"{requests} such requests at once"
            raise CapacityError(
                f"the cache is too small for {what}: {prompt_len} prompt tokens and up to {max_tokens} new ones "
                f"({prompt_len + max_tokens} in all) need {need} pages of {self._page_size} tokens, the cache has "
                f"{self._pages}; raise cache_memory by a factor of {need / self._pages:.2f}, shorten the prompt or "
                "lower max_tokens"
            )

    def add(self, sequence: Sequence) -> None:
        """Queues a request; ``CapacityError`` where it could not run even alone (:meth:`check`)."""
        self.check(len(sequence.prompt), sequence.params.max_tokens)
        self._waiting.append(sequence)

    def schedule(self) -> list[Chunk]:
        """The next step: chunks of prompts where any are left, else one token of every running request."""
        self._budget = [self._group_tokens] * len(self._groups)
        chunks = self._continue_prefills() + self._admit()
        if chunks:
            return chunks
        return [Chunk(s, s.computed, len(s) - s.computed, range(s.owner, s.owner + 1)) for s in self._running]

    def computed(self, chunks: list[Chunk]) -> None:
        """Records that a step has run; after its prefill, a request leaves the ranks that do not own it."""
        for chunk in chunks:
            sequence = chunk.sequence
            sequence.computed = chunk.end
            if sequence.prefilled and len(self._held[sequence.id]) > 1:
                for rank in chunk.ranks:
                    if rank != sequence.owner:
                        self._release(sequence, rank)

    def finish(self, sequence: Sequence) -> None:
        """Ends a request, in whatever state, and frees its pages on every rank."""
        if sequence in self._running:
            self._running.remove(sequence)
        elif sequence in self._waiting:
            self._waiting.remove(sequence)
        for rank in list(self._held.get(sequence.id, ())):
            self._release(sequence, rank)
        self._held.pop(sequence.id, None)

    def _continue_prefills(self) -> list[Chunk]:
        return [c for s in self._running if not s.prefilled and (c := self._prompt_chunk(s))]

    def _admit(self) -> list[Chunk]:
        chunks = []
        while self._waiting and len(self._running) < self._max_num_seqs:
            sequence = self._waiting[0]
            if not self._place(sequence):
                break
            self._waiting.popleft()
            self._running.append(sequence)
            chunk = self._prompt_chunk(sequence)
            assert chunk is not None
            chunks.append(chunk)
        return chunks

    def _prompt_chunk(self, sequence: Sequence) -> Chunk | None:
        length = min(len(sequence.prompt) - sequence.computed, self._budget[sequence.cp_group])
        if length == 0:
            return None
        self._budget[sequence.cp_group] -= length
        return Chunk(sequence, sequence.computed, length, self._groups[sequence.cp_group])

    def _place(self, sequence: Sequence) -> bool:
        """Chooses the group that prefills and the rank that decodes: those with most free pages; False if none fits."""
        open_groups = [g for g in range(len(self._groups)) if self._budget[g] > 0]
        if not open_groups:
            return False
        group = max(open_groups, key=lambda g: sum(self._free[r] for r in self._groups[g]))
        owner = max(self._groups[group], key=lambda r: self._free[r])
        held = dict.fromkeys(self._groups[group], pages_for(len(sequence.prompt), self._page_size))
        held[owner] = self._pages_at_most(len(sequence.prompt), sequence.params.max_tokens)
        if any(count > self._free[rank] for rank, count in held.items()):
            return False
        for rank, count in held.items():
            self._free[rank] -= count
        sequence.cp_group, sequence.owner = group, owner
        sequence.pages = self._allocator.take(held.get(self._rank, 0))
        self._held[sequence.id] = held
        return True

    def _release(self, sequence: Sequence, rank: int) -> None:
        self._free[rank] += self._held[sequence.id].pop(rank)
        if rank == self._rank:
            self._allocator.give_back(sequence.pages)
            sequence.pages = []

    def _pages_at_most(self, prompt_len: int, max_tokens: int) -> int:
        # The last token that is sampled never enters the cache.
        return pages_for(prompt_len + max_tokens - 1, self._page_size)
