"""A rank's pages between device and host memory and between ranks, beside the steps that use them."""

from __future__ import annotations

from collections.abc import Callable

import torch

from dsa_engine.engine.cache.host_copies import HostCopies
from dsa_engine.engine.cache.host_pages import HostPages
from dsa_engine.engine.cache.moves import PageCopy, PageMoves
from dsa_engine.engine.cache.page_exchange import PageExchange
from dsa_engine.model.kv_cache import KVCache
from dsa_engine.parallel.group import Group


class PageTransfer:
    """Moves pages of ``cache`` before a step's layers read them.

    In a step: :meth:`begin`, then the forward pass, whose layers call :meth:`arrive`, or a CUDA graph after
    :meth:`finish`. All of this runs on one thread. On a CPU copies are done at once; exchanges overlap there too.

    Args:
        host: None: no copies.
        max_exchanged: maximum number of pages that a rank sends, and that it receives, in a step.
    """

    def __init__(self, cache: KVCache, group: Group, host: HostPages | None, max_exchanged: int):
        pools = cache.page_words()
        self.host = host
        self._layers = len(pools)
        self._copies = HostCopies(pools, host, cache.latent[0].is_cuda) if host else None
        self._exchange = PageExchange(pools, group, max_exchanged) if not group.alone and max_exchanged else None
        cache.before_use.append(self.arrive)

    @property
    def bytes_to_host(self) -> int:
        """Bytes copied to host memory so far."""
        return self._copies.bytes_to_host if self._copies else 0

    @property
    def bytes_from_host(self) -> int:
        """Bytes copied from host memory so far."""
        return self._copies.bytes_from_host if self._copies else 0

    @property
    def bytes_sent(self) -> int:
        """Bytes sent to other ranks so far."""
        return self._exchange.bytes_sent if self._exchange else 0

    @torch.inference_mode()
    def begin(self, moves: PageMoves) -> Callable[[], None]:
        """Starts a step's moves, after all work that the current stream has been given.

        Returns:
            a function that blocks until the copies are done, for what reads or writes their slots; any thread may call
            it.
        """
        copied = self._copy(moves.copies)
        if moves.exchanges:
            if self._exchange is None:
                raise ValueError("pages are exchanged, but there is one rank, or max_exchanged is 0")
            self._exchange.start(moves.sends, moves.receives, self._copies.join if self._copies else _nothing)
        return copied

    def arrive(self, layer: int) -> None:
        """Makes the current stream wait for the moves of a layer; starts the exchange of the next layer before."""
        if self._exchange is not None:
            self._exchange.arrive(layer)
        if self._copies is not None:
            self._copies.join_for_good(layer)

    @torch.inference_mode()
    def finish(self) -> None:
        """Makes the current stream wait for the moves of all layers: after an eager step, also one that failed, and
        before a CUDA graph."""
        for layer in range(self._layers):
            self.arrive(layer)

    @torch.inference_mode()
    def copy_out(self, copies: list[tuple[int, int]]) -> Callable[[], None]:
        """Starts to copy pages to host memory, (page, slot) each, after the step that was launched last.

        The layers of the next step wait for it in :meth:`arrive`, or the whole step in :meth:`finish`.

        Returns:
            a function that blocks until the slots are filled; any thread may call it.
        """
        return self._copy([PageCopy(True, page, slot) for page, slot in copies])

    def _copy(self, copies: list[PageCopy]) -> Callable[[], None]:
        if not copies:
            return _nothing
        if self._copies is None:
            raise ValueError(f"{len(copies)} pages to copy, and no host memory for them")
        return self._copies.start(copies).block


def _nothing(*_: object) -> None:
    pass
