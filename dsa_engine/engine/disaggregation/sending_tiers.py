"""Pages that a step of the prefill side fills leave under it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from dsa_engine.engine.requests.page_ledger import PageLedger
from dsa_engine.engine.requests.request import Chunk
from dsa_engine.engine.tiers import PageTiers
from dsa_engine.model.cache.page_link import RankPages
from dsa_engine.model.cache.page_sender import PageSender
from dsa_engine.model.kv_cache import KVCache


class SendingTiers(PageTiers):
    """``PageTiers`` that also sends pages to the decode side.

    Attributes:
        leaving: called before each step with its chunks; returns the pages that this rank sends under it.
    """

    def __init__(self, cache: KVCache, ledger: PageLedger, sender: PageSender):
        super().__init__(cache, ledger)
        self._sender = sender
        self.leaving: Callable[[Sequence[Chunk]], list[RankPages]] = lambda chunks: []

    @contextmanager
    def moving(self, chunks: Sequence[Chunk], overlapped: bool = False) -> Iterator[None]:
        self._sender.begin(self.leaving(chunks))
        try:
            with super().moving(chunks, overlapped):
                yield
        finally:
            self._sender.finish()
