"""The input of one rank's forward pass, built once per step and read by every layer: rows, micro-batches, block tables.

A request of 128K tokens has 2,048 pages, and nearly all of them stay the same from one decode step to the next. So each
list of pages that a step uses has a row in a table on the host and in its copy on the device, and only changes travel:
new pages of a list, and lists without a row. Then the rows of a decode step's requests are copied, on the device, to
its table; a prefill's come with its other tensors. A request that ends need not be reported: a new list takes the row
that has been unused the longest.

A pass through the layers is a generator: it launches stages, and yields the name of a stage whose transfer it has just
started and whose result it needs next. Each micro-batch runs up to its next transfer, then the other one does. In an
MoE layer that is::

    first micro-batch   second micro-batch                           travels
    … dispatch                                                       tokens of the first
                        combine, attention, gate, dispatch           and of the second
    experts                                                          sums of the first
                        experts                                      and of the second
    combine, attention, gate, dispatch                               tokens of the first, in the next layer

On CUDA the host waits for the counts of an all-to-all when the device has other work: for those of the first
micro-batch when the second one's attention is launched, and for those of the second when the first one's experts are.
The tokens then travel beside that work (`ForwardBatch.send_tokens`). A CPU sends them at once.

The first micro-batch is always ahead, so its cache rows of a layer are stored before the second one reads them. A step
that is not cut is one pass, and its stages follow one another.
"""

from __future__ import annotations

import itertools
import weakref
from bisect import bisect_right
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
import torch

from dsa_engine.kernels.rows.segment import CuSeqlens, Segment, Segments, slots_of
from dsa_engine.kernels.runtime.integers import cdiv, next_power_of_2
from dsa_engine.kernels.runtime.pieces import Pieces, Results
from dsa_engine.kernels.runtime.transfer import upload
from dsa_engine.model.context_shards import NO_PAGE, GroupRows, LayerBuffers
from dsa_engine.model.pages.hot_rows import HotStep
from dsa_engine.model.profile_stages import stage
from dsa_engine.model.selection import SelectionRecorder
from dsa_engine.parallel.group import Group

_INITIAL_SIZE = 64  # rows of the block tables, and pages of a row

Result = TypeVar("Result")
Pass = Generator[str, None, Result]  # yields names of `profile_stages.STAGES`


class BlockTables:
    """Rows of page numbers. ``host``: int32 ``[rows, pages]`` on the CPU; the entries after the last page of a row are
    arbitrary valid pages. ``uploaded``: number of new page numbers that have been copied to the device so far."""

    rows_each = 1  # rows of a list

    def __init__(self, page_size: int, device: torch.device):
        self.page_size = page_size
        self.host = torch.zeros(_INITIAL_SIZE, _INITIAL_SIZE, dtype=torch.int32)
        self.uploaded = 0
        self._device = device
        self._on_device = upload(self.host, device)  # on a CPU the same tensor
        # For every list of pages that has a row, by its id: the row, the list itself (its id is not reused while it is
        # referenced), and the number of its pages in the row. The last used list is the last entry.
        self._known: dict[int, tuple[int, Sequence[int], int]] = {}
        self._clock = itertools.count(1)
        self._stamps: dict[int, int] = {}  # for each row, the time of its last change
        # For every tensor that was given to gather, by its id: the rows that it holds, and their stamps.
        self._gathered: dict[int, tuple[weakref.ref[torch.Tensor], list[tuple[int, int]]]] = {}

    def shape(self, requests: int, context: int) -> tuple[int, int]:
        """The shape of the tables of a decode step with so many requests on a rank, of ``context`` tokens each."""
        return requests, cdiv(context, self.page_size)

    def rows(self, requests: Sequence[Sequence[int]]) -> list[int]:
        """The row of each request's pages, up to date on the device for work that is launched from now on. A request's
        page numbers, in order of position, are always the same object, which only grows."""
        try:
            return self._updated_rows(requests)
        except BaseException:  # an interrupt, too: the contents of the device's copy are unknown now
            self._known.clear()
            self._gathered.clear()
            raise

    def _updated_rows(self, requests: Sequence[Sequence[int]]) -> list[int]:
        # Twice as many rows as one step needs: requests that take turns keep their rows.
        self._make_room(2 * self.rows_each * len(requests), self._width(max(map(len, requests), default=0)))
        for pages in requests:  # so that none of them loses its row to another one
            if (known := self._known.pop(id(pages), None)) is not None:
                self._known[id(pages)] = known
        rows, cells, numbers = [], [], []
        for pages in requests:
            row, known_pages = self._row(pages)
            for to, first, new in self._new_cells(row, pages, known_pages) if known_pages < len(pages) else ():
                last = first + len(new)
                self.host[to, first:last] = new
                self._stamps[to] = next(self._clock)
                cells.append(torch.arange(first, last) + to * self.host.shape[1])
                numbers.append(new)
            self._known[id(pages)] = row, pages, len(pages)
            rows.append(row)
        self.uploaded += sum(map(len, numbers))
        if not self._copied_whole() and numbers and self._on_device is not self.host:
            at, new = upload(torch.stack((torch.cat(cells), torch.cat(numbers).long())), self._device)
            self._on_device.view(-1).index_copy_(0, at, new.int())
        return rows

    def gather(self, rows: Sequence[int], width: int, out: torch.Tensor | None = None) -> torch.Tensor:
        """The tables of a step on the device: int32 ``[len(rows), width]``, in the order of ``rows``. Nothing else may
        write ``out``; nothing is done if it already holds these rows."""
        self._make_room(0, width)
        self._copied_whole()
        held = [(row, self._stamps.get(row, 0)) for row in rows]
        if out is not None:
            written, contents = self._gathered.get(id(out), (None, None))
            if written is not None and written() is out and contents == held:
                return out
            self._gathered.pop(id(out), None)
        numbers = upload(torch.tensor(rows, dtype=torch.int64), self._device)
        tables = torch.index_select(self._on_device[:, :width], 0, numbers, out=out)
        if out is not None:
            self._gathered[id(out)] = weakref.ref(out), held
        return tables

    def _width(self, pages: int) -> int:
        """Entries of a row for a list of so many pages."""
        return pages

    def _new_cells(self, row: int, pages: Sequence[int], known: int) -> list[tuple[int, int, torch.Tensor]]:
        """What a list has that its ``row`` lacks, after its first ``known`` pages: row, first column, and numbers."""
        return [(row, known, torch.from_numpy(np.array(pages[known:], np.int32)))]

    def _row(self, pages: Sequence[int]) -> tuple[int, int]:
        """The row of a list, and the number of its pages in it."""
        if id(pages) in self._known:
            row, _, known = self._known[id(pages)]
            return row, known
        if (row := self.rows_each * len(self._known)) < self.host.shape[0]:
            return row, 0
        return self._known.pop(next(iter(self._known)))[0], 0

    def _copied_whole(self) -> bool:
        """Returns whether it was copied, as it had grown."""
        grown = self._on_device.shape != self.host.shape
        if grown:
            self._on_device = upload(self.host, self._device)
        return grown

    def _make_room(self, rows: int, pages: int) -> None:
        old = self.host
        if rows <= old.shape[0] and pages <= old.shape[1]:
            return
        sizes = [next_power_of_2(max(both)) for both in zip((rows, pages), old.shape, strict=True)]
        self.host = torch.zeros(*sizes, dtype=old.dtype)
        self.host[: old.shape[0], : old.shape[1]] = old


class ShardTables(BlockTables):
    """Of each list the pages on this rank, in two rows: their numbers here, and their indices in the list, ascending,
    :data:`NO_PAGE` after the last. The second row follows the first, which is the row of the list."""

    rows_each = 2

    def __init__(self, page_size: int, device: torch.device, group: Group, pages: int):
        super().__init__(page_size, device)
        self._group, self._pages = group, pages
        self._filled: dict[int, int] = {}  # by row: number of its entries
        self.host[1::2] = NO_PAGE
        self._on_device = upload(self.host, device)

    def shape(self, requests: int, context: int) -> tuple[int, int]:
        """Of all requests of the group, whose pages lie evenly; the second half of the rows are indices."""
        ranks = self._group.size
        return self.rows_each * ranks * requests, cdiv(super().shape(requests, context)[1], ranks)

    def _width(self, pages: int) -> int:
        # All pages of a list may lie here. Dummy requests lie evenly, but have more pages than there are.
        return min(pages, max(self._pages, cdiv(pages, self._group.size)))

    def rows(self, requests: Sequence[Sequence[int]]) -> list[int]:
        try:
            return super().rows(requests)
        except BaseException:  # so that whatever lies there is overwritten
            self._filled = dict.fromkeys(range(0, len(self.host), self.rows_each), self.host.shape[1])
            raise

    def _new_cells(self, row: int, pages: Sequence[int], known: int) -> list[tuple[int, int, torch.Tensor]]:
        new = np.array(pages[known:], np.int32)
        index = (new % self._group.size == self._group.index).nonzero()[0]
        filled = self._filled.get(row, 0)
        first = filled if known else 0
        self._filled[row] = last = first + len(index)
        after = np.full(max(0, filled - last), NO_PAGE, np.int32)  # in place of those of another list
        both = new[index] // self._group.size, np.concatenate(((index + known).astype(np.int32), after))
        return [(row + i, first, torch.from_numpy(cells)) for i, cells in enumerate(both) if len(cells)]

    def _make_room(self, rows: int, pages: int) -> None:
        rows_before, width = self.host.shape
        super()._make_room(rows, pages)
        self.host[1::2, width:] = NO_PAGE
        self.host[rows_before + 1 :: 2] = NO_PAGE


@dataclass(frozen=True)
class MHASegments:
    """The rows that attend in MHA form, as one varlen call takes them: each segment is a separate sequence."""

    cu_seqlens_q: CuSeqlens  # the rows of each segment
    cu_seqlens_k: CuSeqlens  # the tokens that the last row of each segment sees
    key_slots: torch.Tensor  # [cu_seqlens_k.rows] int32: cache slots of these tokens
    _parts: dict[int, list[tuple[slice, MHASegments]]] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def of(cls, segments: Sequence[Segment], block_tables: torch.Tensor, page_size: int) -> MHASegments | None:
        """On the host; None without segments. Tokens that two segments of a request see are listed for both."""
        if not segments:
            return None
        seen = [s.end for s in segments]
        positions = torch.cat([torch.arange(count) for count in seen])
        sequences = torch.tensor([s.sequence for s in segments]).repeat_interleave(torch.tensor(seen))
        slots = slots_of(positions, block_tables, sequences, page_size)
        return cls(CuSeqlens.of([s.length for s in segments]), CuSeqlens.of(seen), slots)

    def on(self, queries: torch.Tensor, keys: torch.Tensor, key_slots: torch.Tensor) -> MHASegments:
        """The same with these tensors on the device."""
        offsets = (replace(self.cu_seqlens_q, on_device=queries), replace(self.cu_seqlens_k, on_device=keys))
        return MHASegments(*offsets, key_slots)

    def parts(self, max_keys: int) -> list[tuple[slice, MHASegments]]:
        """The segments in groups that see at most ``max_keys`` tokens together, or one segment if that alone sees more:
        the rows of each group, and its segments. Made once, for all layers."""
        if max_keys not in self._parts:
            keys = self.cu_seqlens_k.offsets
            first, parts = 0, []
            while first < len(self.cu_seqlens_k):
                last = max(first + 1, bisect_right(keys, keys[first] + max_keys) - 1)
                parts.append(self._part(first, last))
                first = last
            self._parts[max_keys] = parts
        return self._parts[max_keys]

    def _part(self, first: int, last: int) -> tuple[slice, MHASegments]:
        rows, keys = self.cu_seqlens_q.offsets, self.cu_seqlens_k.offsets
        slots = self.key_slots[keys[first] : keys[last]]
        part = MHASegments(self.cu_seqlens_q.part(first, last), self.cu_seqlens_k.part(first, last), slots)
        return slice(rows[first], rows[last]), part


@dataclass
class MicroBatchPair:
    """The two micro-batches of a step that is cut, each for all layers; the second is made when the first is on its
    way."""

    batches: tuple[Callable[[], ForwardBatch], Callable[[], ForwardBatch]]
    # Makes [T] int64: the index of each row of the step among those of both; None: the same order.
    order: Callable[[], torch.Tensor] | None


@dataclass
class ForwardBatch:
    """One rank's tensors for one forward pass over T rows; with T = 0 the rank only takes part in collectives.

    Attention has three forms, which give the same result for a row that sees at most ``index_topk`` tokens. The rows
    are sorted by form, so that each form has a slice of them:

    * ``mha``: keys and values of every head are expanded from the latent rows. Cheapest if many rows share them.
    * ``dense_mqa``: absorbed form: W_UK goes into the query, and all heads read the latent rows of all visible tokens.
    * ``sparse_mqa``: absorbed form over the ``index_topk`` rows that the lightning indexer selects.
    """

    rows: int  # T
    input_ids: torch.Tensor  # [tp_size, tp_rows] int64: ids of every rank of the tensor-parallel group, padded with 0
    cos: torch.Tensor  # [T, rope / 2] float32
    sin: torch.Tensor
    mha: MHASegments | None  # None without such rows
    dense_mqa: Segments  # rows are counted from the first row of this form
    sparse_mqa: Segments
    block_tables: torch.Tensor  # [sequences, max_pages] int32
    slot_mapping: torch.Tensor  # [R] int32: the slot of each (gathered) cache row; R is T, or size · cp_rows of a group
    gathers: Group | None  # the group that cache rows are gathered over; None: they are not
    cp_rows: int  # largest row count in this group, or in the context-parallel one
    tp_rows: int  # … in the tensor-parallel group
    ep_rows: int  # … in the expert-parallel group
    decodes: bool  # whether this is a decode step of all ranks
    token_mask: torch.Tensor | None  # [T] bool: rows that are tokens, in a padded step; None where all are
    micro_batches: MicroBatchPair | None = None  # the layers run these instead
    recorder: SelectionRecorder | None = None  # gets what rows attend to
    # [sparse rows, index_topk] int32: slots that an earlier pass has selected, in place of the indexer
    selection: torch.Tensor | None = None
    first_micro_batch: bool = False  # whether the other one stores its rows of each layer after this one
    # Where ranks hold a context together, or a prefill reads spilled pages: in a prefill the slots above are those of
    # buffers, which have the rows of all pages, and these are of this rank's pools, [R] int32, −1 where another one
    # stores, or the page is spilled; in a decode step there are the rows of all ranks, and the slots above are −1.
    buffers: LayerBuffers | None = None
    pool_slots: torch.Tensor | None = None
    shards: GroupRows | None = None
    hot: HotStep | None = None  # in a decode step: where the rows of spilled pages are; None: there are none
    _seen_pages: tuple[torch.Tensor, torch.Tensor] | None = None
    # In a micro-batch on CUDA: sends of tokens that wait for their counts, of both micro-batches; None: none waits.
    unsent: list[Callable[[], None]] | None = None
    # Records what layers do with these tensors; None: each runs it anew. A batch made of this one has none.
    pieces: Pieces | None = field(default=None, init=False)

    @property
    def mha_rows(self) -> int:
        """Rows [0, mha_rows) attend in MHA form."""
        return 0 if self.mha is None else self.mha.cu_seqlens_q.rows

    @property
    def first_sparse(self) -> int:
        """Rows [mha_rows, first_sparse) attend in dense MQA form, rows [first_sparse, T) in sparse MQA form."""
        return self.mha_rows + self.dense_mqa.rows

    def slots_in_pool(self, layer: int, topk_slots: torch.Tensor | None) -> torch.Tensor | None:
        """Where the layer's latent pool has the selected rows, which are brought there from spilled pages."""
        return topk_slots if self.hot is None or topk_slots is None else self.hot.find(layer, topk_slots)

    def seen_pages(self, pool: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The pages whose tokens the sparse rows see, int32 ``[n]``, and where among them each page of a pool is,
        ``[pages of the pool]``; of other pages it is undefined. Made once, for all layers."""
        if self._seen_pages is None:
            contexts, page_size = self.sparse_mqa.contexts.items(), pool.shape[1]
            pages = torch.cat([self.block_tables[sequence, : cdiv(n, page_size)] for sequence, n in contexts])
            index = pages.new_empty(pool.shape[0])
            index[pages.long()] = torch.arange(len(pages), dtype=torch.int32, device=pages.device)
            self._seen_pages = pages, index
        return self._seen_pages

    def piece(self, function: Callable[..., Results], owner: object, inputs: list[Any]) -> Results:
        """``function(owner, self, inputs)``, see :meth:`.Pieces.run`."""
        if self.pieces is None:
            return function(owner, self, inputs)
        return self.pieces.run(function, owner, self, inputs)

    def send_tokens(self) -> None:
        """Sends the tokens that wait for their counts; called when the device has work while the host waits."""
        while self.unsent:
            with stage("MoE dispatch"):
                self.unsent.pop()()


def run_interleaved(passes: Sequence[Pass[Result]]) -> list[Result]:
    """Runs the passes to their ends, round-robin up to the next transfer of each."""
    results: dict[int, Result] = {}
    while len(results) < len(passes):
        for number, one in enumerate(passes):
            if number not in results:
                try:
                    next(one)
                except StopIteration as end:
                    results[number] = end.value
    return [results[number] for number in range(len(passes))]
