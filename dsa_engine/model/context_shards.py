"""A context that the ranks of a decode-context-parallel group hold together: a page of a request lies on one of them.

A page's number is one of the group's: ``page % ranks`` is the rank that holds it, ``page // ranks`` its page there.

Prefill: every rank reads all rows of a layer, from a buffer of this layer (:class:`LayerBuffers`). The pages that were
complete before come into it from the ranks that hold them, under the layer before; the step's own rows follow.

Decode: every rank computes its own rows up to their queries, and then attends with the rows of the whole group to the
tokens that it holds (:class:`GroupRows`). Its tokens of a request are numbered one after the other, in order of their
positions: what a row sees of them is a prefix, so that all kernels run as they do elsewhere. A layer::

    every rank                                      travels
    cache rows, index queries                       to all ranks, which store the rows of their pages
    absorbed queries                                to all ranks, under the indexer
    keys of the best tokens here (candidates)       to the row's rank, which finds the k-th best of all: a threshold
    the threshold                                   to all ranks, which select their candidates from it on; of few
                                                    rows the keys go to all, which find it themselves
    attention over these: output, log-sum-exp       to the row's rank, which merges them
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from dsa_engine.kernels.attention.dense_mla import dense_mla
from dsa_engine.kernels.attention.merge_splits import merge_splits
from dsa_engine.kernels.attention.sparse_attention import sparse_attention
from dsa_engine.kernels.formats.row_format import IndexKeyFormat
from dsa_engine.kernels.indexer.lightning_indexer import lightning_indexer
from dsa_engine.kernels.indexer.nth_largest import FEW_ROWS, nth_largest
from dsa_engine.kernels.indexer.slots_above import slots_above
from dsa_engine.kernels.rows.segment import Segments, local_visible, slots_of
from dsa_engine.kernels.runtime.integers import cdiv
from dsa_engine.kernels.runtime.transfer import upload
from dsa_engine.model.pages.page_map import MovedPages, PageMap
from dsa_engine.model.profile_stages import stage
from dsa_engine.parallel.group import Group

IndexQueries = tuple[torch.Tensor, torch.Tensor]  # and head weights

NO_PAGE = 2**25  # later than the index of any page


class Pools(Protocol):
    """What buffers need of :class:`.KVCache`."""

    latent: list[torch.Tensor]
    index_keys: list[torch.Tensor | None]
    pages: int
    spilled: int
    page_size: int
    group: Group | None
    page_map: PageMap

    def use(self, layer: int) -> None: ...


class LayerBuffers:
    """Buffers of a layer's latent rows and index keys for a prefill step, with the pages of all of its chunks: first
    those with rows of earlier steps, as they come from the ranks, or from this one alone if some of its pages are
    spilled; then those that the step begins. Spilled pages that the step writes are copied from the buffers.

    Those of several ranks begin to fill (:meth:`start`) under the layer before. They are dropped after the layer; so
    two exist, or one for each layer that one micro-batch is ahead of the other. A page that the step goes on to fill
    comes with its first rows.
    """

    def __init__(self, cache: Pools, chunks: Sequence[tuple[Sequence[int], int, int]], layers: int):
        """``chunks``: pages of the request, start and end of each chunk. ``layers``: those before MTP modules, which
        may not run."""
        self._cache, self._group, self._layers = cache, cache.group, layers
        self._ranks, self._index = (1, 0) if cache.group is None else (cache.group.size, cache.group.index)
        size, ranks, index = cache.page_size, self._ranks, self._index
        self._entries: dict[int, tuple[list[torch.Tensor], list[Callable[[], torch.Tensor]]]] = {}
        numbers = [np.array(pages, np.int32) for pages, *_ in chunks]
        borders = [(cdiv(start, size), cdiv(end, size)) for _, start, end in chunks]
        none = [np.empty(0, np.int32)]
        earlier = np.unique(np.concatenate(none + [of[:new] for of, (new, _) in zip(numbers, borders, strict=True)]))
        begun = np.concatenate(none + [of[new:end] for of, (new, end) in zip(numbers, borders, strict=True)])
        of_ranks = [earlier[earlier % ranks == rank] for rank in range(ranks)]
        each = max(map(len, of_ranks))  # pages that come from each rank, as many from all
        # By number of a page in the group: its number in the buffers.
        self._page = np.zeros((cache.pages + cache.spilled) * ranks, np.int32)
        for rank, of_rank in enumerate(of_ranks):
            self._page[of_rank] = rank * each + np.arange(len(of_rank))
        self.gathered = ranks * each
        self._page[begun] = self.gathered + np.arange(len(begun))
        self.pages = self.gathered + len(begun)
        sent = np.zeros(each, np.int64)
        sent[: len(of_ranks[index])] = of_ranks[index] // ranks
        device = cache.latent[0].device
        self._sent = cache.page_map.moved(sent.tolist(), upload(torch.from_numpy(sent), device))
        # Spilled pages here with rows of the step, and their numbers in the buffers.
        self._written: tuple[MovedPages, torch.Tensor] | None = None
        if cache.spilled:
            firsts = [start // size for _, start, _ in chunks]
            written = [of[first:end] for of, first, (_, end) in zip(numbers, firsts, borders, strict=True)]
            pages = np.unique(np.concatenate(none + written))
            pages = pages[(pages % ranks == index) & (pages // ranks >= cache.pages)]
            if len(pages):
                both = np.stack((here := pages // ranks, self._page[pages])).astype(np.int64)
                there, own = upload(torch.from_numpy(both), device)
                self._written = cache.page_map.moved(here.tolist(), there), own
                cache.page_map.overwrite(here.tolist())

    def pages_of(self, numbers: np.ndarray) -> np.ndarray:
        """int32, the page in the buffers for each number of a page of these chunks in the group."""
        return self._page[numbers]

    def slots(self, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """int32 slots of the buffers, and of this rank's pools, for slots of the group; −1 for others and for −1. A
        spilled page has none in the pools."""
        size, ranks, pages = self._cache.page_size, self._ranks, self._cache.pages
        page, at = slots // size, slots % size
        here = (slots >= 0) & (page % ranks == self._index) & (page // ranks < pages)
        in_buffers = np.where(slots >= 0, self._page[page] * size + at, -1)
        return in_buffers.astype(np.int32), np.where(here, page // ranks * size + at, -1).astype(np.int32)

    def start(self, layer: int) -> None:
        """Begins to fill the buffers of a layer, if that has not begun."""
        if layer in self._entries:
            return
        self._cache.use(layer)
        made, waits = [], []
        pools = [pool for pool in (self._cache.latent[layer], self._cache.index_keys[layer]) if pool is not None]
        for pool, words in zip(pools, self._cache.page_map.layers[layer], strict=True):
            made.append(buffer := pool.new_empty(self.pages, *pool.shape[1:]))
            if self.gathered:
                into = buffer[: self.gathered]
                own = into if self._group is None else pool.new_empty(self.gathered // self._ranks, *pool.shape[1:])
                words.read(self._sent, words.of(own))
                if self._group is not None:
                    waits.append(self._group.all_gather_async(own, into=into))
        self._entries[layer] = made, waits

    def of(self, layer: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Latent rows and index keys of a layer that has started, with all pages of earlier steps."""
        made, waits = self._entries[layer]
        while waits:
            waits.pop()()
        return made[0], made[1] if len(made) > 1 else None

    def start_next(self, layer: int) -> None:
        """Of a rank alone the copies would be no earlier: they run between the layers."""
        if self._group is not None and layer + 1 < self._layers:
            self.start(layer + 1)

    def drop(self, layer: int) -> None:
        """Frees the buffers of a layer and of those before it, once what the step has stored in spilled pages here has
        been copied to where they lie."""
        for old in [one for one in self._entries if one <= layer]:
            self.of(old)
            made, _ = self._entries.pop(old)
            if self._written is not None:
                moved, own = self._written
                for buffer, words in zip(made, self._cache.page_map.layers[old], strict=True):
                    words.write(moved, words.of(buffer).index_select(0, own))


@dataclass
class GroupRows:
    """The rows of all ranks of a group in a decode step, as many of each, in the order of the ranks."""

    group: Group
    segments: Segments  # of the rows; on the device they see so many tokens of this rank
    tables: torch.Tensor  # [requests, pages] int32: the pages here of every request of the group
    page_index: torch.Tensor  # the same shape: the index of each page in its request, NO_PAGE after the last
    slots: torch.Tensor  # [rows] int32: slots of their cache rows, −1 where another rank has the page
    page_size: int

    @classmethod
    def of(
        cls, group: Group, positions: torch.Tensor, segments: Segments, tables: torch.Tensor, page_size: int
    ) -> GroupRows:
        """``positions``: of all rows, int32, −1 for padding; ``tables``: :class:`ShardTables` of their requests;
        ``segments``: gets what they see."""
        pages, page_index = tables.chunk(2)
        visible = local_visible(positions, page_index, segments.sequences, page_size)
        segments.visible.copy_(visible)
        # A row's own token is the last one it sees, if it lies here.
        last = (visible - 1).clamp_(min=0)
        page = page_index[segments.sequences, last // page_size]
        own = visible.gt(0) & page.eq(positions // page_size)
        slots = slots_of(last.where(own, -1), pages, segments.sequences, page_size)
        return cls(group, segments, pages, page_index, slots, page_size)

    def gather_queries(self, queries: IndexQueries) -> Callable[[], IndexQueries]:
        """Starts to gather index queries and head weights of all rows; returns a function that waits for them."""
        q, weights = queries
        rows, shape = q.flatten(1).view(torch.uint8), q.shape[1:]
        width, wait = rows.shape[1], self.group.all_gather_async(torch.cat((rows, weights.view(torch.uint8)), dim=1))

        def gathered() -> IndexQueries:
            both = wait()
            of_all = both[:, :width].contiguous().view(q.dtype).view(-1, *shape)
            return of_all, both[:, width:].contiguous().view(weights.dtype)

        return gathered

    def select(
        self, queries: IndexQueries, pool: torch.Tensor, k: int, key_format: IndexKeyFormat, workspace: int
    ) -> torch.Tensor:
        """int32 ``[rows, k]``: slots here of the k best tokens of every row, and −1 after them."""
        with stage("lightning indexer"):
            keys = torch.empty(self.segments.rows, k, dtype=torch.int64, device=pool.device)
            slots = lightning_indexer(
                *queries, pool, self.tables, self.segments, k,
                key_format=key_format, workspace=workspace, page_index=self.page_index, keys=keys,
            )  # fmt: skip
        ranks, few = self.group.size, len(keys) <= FEW_ROWS
        with stage("communication"):
            parts = self._gather_numbers(keys) if few else self.group.all_to_all(keys)
        with stage("lightning indexer"):
            thresholds = nth_largest(parts.view(ranks, -1, k), k)
        if not few:
            with stage("communication"):
                thresholds = self._gather_numbers(thresholds[:, None])[:, 0]
        with stage("lightning indexer"):
            return slots_above(keys, slots, thresholds)

    def _gather_numbers(self, numbers: torch.Tensor) -> torch.Tensor:
        """Gathers int64 numbers, as int32: an emulated rank takes int64 for ids of tokens."""
        return self.group.all_gather(numbers.view(torch.int32)).view(torch.int64)

    def positions_of(self, row: int, slots: torch.Tensor) -> torch.Tensor:
        """int32, the positions in a row's request of slots here; −1 stays −1. It waits for the device."""
        sequence, page = self.segments.sequences[row], slots // self.page_size
        held = self.page_index[sequence] < NO_PAGE
        pages, index = self.tables[sequence][held].sort(), self.page_index[sequence][held]
        if not len(index):
            return slots
        at = torch.searchsorted(pages.values, page).clamp_(max=len(index) - 1)
        return torch.where(slots < 0, -1, index[pages.indices[at]] * self.page_size + slots % self.page_size).int()

    def attend(
        self, q: torch.Tensor, pool: torch.Tensor, slots: torch.Tensor | None, how: dict[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention of this rank's rows to the tokens of all ranks, ``[own rows, heads, rank]``, and its log-sum-exp.
        ``q``: absorbed queries of all rows; ``slots``: the selection, None: all tokens."""
        if slots is None:
            out, lse = dense_mla(q, pool, self.tables, self.segments, **how)
        else:
            out, lse = sparse_attention(q, pool, slots, **how)
        with stage("communication"):
            parts = torch.cat((out.view(torch.uint8), lse[..., None].contiguous().view(torch.uint8)), dim=-1)
            parts = self.group.all_to_all(parts).view(self.group.size, -1, *parts.shape[1:])
        width = parts.shape[-1] - lse.itemsize
        of_parts = parts[..., :width].contiguous().view(out.dtype)
        return merge_splits(of_parts, parts[..., width:].contiguous().view(lse.dtype)[..., 0], out.dtype)
