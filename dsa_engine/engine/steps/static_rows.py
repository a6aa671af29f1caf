"""Rows of static shape: the same number for every request, at positions that are on the device.

The position of the next drafts depends on how many were accepted. So positions, slots and RoPE angles are computed on
the device, without waiting, and passes over these rows can be part of a CUDA graph. A row without a page, or of no
request, is padding and has position -1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import NamedTuple

import torch

from dsa_engine.engine.requests.request import Chunk
from dsa_engine.engine.steps.batch import known_ids
from dsa_engine.engine.steps.context_buckets import Bucket
from dsa_engine.engine.steps.plan import StepPlan
from dsa_engine.kernels.rows.segment import Segment, Segments, slots_of
from dsa_engine.kernels.runtime.transfer import upload
from dsa_engine.model.context_shards import GroupRows
from dsa_engine.model.forward_batch import ForwardBatch, MicroBatchPair
from dsa_engine.model.kv_cache import KVCache
from dsa_engine.model.model import Model


@dataclass(frozen=True)
class StaticRows:
    """``each`` rows of every request of a bucket; makes batches of them on the device."""

    model: Model
    cache: KVCache
    each: int
    is_cut: bool  # whether batches have two micro-batches, each of half of the requests
    segments: Segments  # on the host rows see their maximum; on the device each batch writes what they see
    # Where ranks hold contexts together: the same of the rows of all of them, by their first and last own row.
    of_group: dict[tuple[int, int], Segments]
    offsets: torch.Tensor  # [each] int64: 0, 1, …
    frequencies: torch.Tensor

    @classmethod
    def of(cls, bucket: Bucket, each: int, model: Model, cache: KVCache, max_visible: Sequence[int] = ()) -> StaticRows:
        """``max_visible``: maximum number of tokens that each request's rows see; default: the bucket's context."""
        device = model.runtime.mesh.device
        visible = max_visible or [bucket.context] * bucket.requests
        segments = [Segment(i * each, each, i, max(0, tokens - each)) for i, tokens in enumerate(visible)]
        rows, of_group = bucket.requests * each, {}
        if cache.group is not None:
            here = cache.page_size * cache.block_tables.shape(bucket.requests, bucket.context)[1]
            half = bucket.requests // 2 * each
            ranks, halves = range(cache.group.size), ((0, half), (half, rows)) if bucket.is_cut else ()
            for part in ((0, rows), *halves):
                own = Segments.of(segments).part(*part)
                moved = [
                    Segment(rank * own.rows + s.row, s.length, rank * bucket.requests + s.sequence, here - s.length)
                    for rank in ranks
                    for s in own
                ]
                of_group[part] = Segments.of(moved, device)
        return cls(
            model,
            cache,
            each,
            bucket.is_cut,
            Segments.of(segments, device),
            of_group,
            torch.arange(each, device=device),
            model.config.rope.inverse_frequencies.to(device),
        )

    def batch(self, tables: torch.Tensor, positions: torch.Tensor, input_ids: torch.Tensor) -> ForwardBatch:
        """The batch of these rows, by always the same launches: from block tables (:func:`block_tables_of`), and
        positions and ids, int64 ``[requests · each]``, positions -1 for padding."""
        config, rows = self.model.config, len(positions)
        cos, sin = config.rope.cos_sin(positions.clamp(min=0), self.frequencies)
        at = positions.int()  # as the CPU's kernel of slots takes them
        torch.add(at, 1, out=self.segments.visible)
        ids = self.model.runtime.mesh.tp.all_gather(input_ids).view(-1, rows)
        token_mask, size, group = positions >= 0, self.cache.page_size, self.cache.group
        slots, at_all = at, at
        if group is None:
            slots = slots_of(at, tables, self.segments.sequences, size)
        else:
            at_all = group.all_gather(at).view(group.size, rows)

        def part(first: int, last: int) -> ForwardBatch:
            count, seen, none = last - first, self.segments.part(first, last), self.segments.part(0, 0)
            hot, each, ranks = self.cache.hot, self.each, 1 if group is None else group.size
            own_slots, shards = slots[first:last], None
            if group is not None:
                together = at_all[:, first:last].flatten(), self.of_group[first, last]
                shards = GroupRows.of(group, *together, tables, size)
                own_slots = shards.slots
            return ForwardBatch(
                rows=count,
                input_ids=ids[:, first:last],
                cos=cos[first:last],
                sin=sin[first:last],
                mha=None,
                dense_mqa=none if config.has_indexer else seen,
                sparse_mqa=seen if config.has_indexer else none,
                block_tables=tables,
                slot_mapping=own_slots,
                gathers=group,
                cp_rows=count,
                tp_rows=count,
                ep_rows=count,
                decodes=True,
                token_mask=token_mask[first:last],
                shards=shards,
                hot=None if hot is None else hot.step(ranks, rows // each, first // each, last // each),
            )

        if not self.is_cut:
            return part(0, rows)
        half = rows // self.each // 2 * self.each  # no request is cut
        halves = partial(part, 0, half), partial(part, half, rows)
        return replace(part(0, rows), micro_batches=MicroBatchPair(halves, None))


def block_tables_of(
    chunks: Sequence[Sequence[Chunk]], cache: KVCache, shape: Sequence[int], out: torch.Tensor | None = None
) -> torch.Tensor:
    """The block tables of the chunks of this rank, or of each rank that holds contexts together with it, on the device:
    int32 of ``shape`` (:meth:`.BlockTables.shape`). Those of padding are some request's: nothing that is read there
    counts. The sets of hot rows of these requests, if any, are loaded too."""
    tables = cache.block_tables
    known = iter(tables.rows([chunk.request.pages for of_rank in chunks for chunk in of_rank]))
    requests, rows = shape[0] // (tables.rows_each * len(chunks)), list[int]()
    for of_rank in chunks:
        rows += [*islice(known, len(of_rank)), *[0] * (requests - len(of_rank))]
    if cache.hot is not None:
        cache.hot.load([[chunk.request.hot_set for chunk in of_rank] for of_rank in chunks], requests)
    return tables.gather([row + i for i in range(tables.rows_each) for row in rows], shape[1], out)


def eager_batch(step: StepPlan, model: Model, cache: KVCache, sampled: torch.Tensor | None) -> ForwardBatch:
    """The batch of a step that is padded and runs once; for ``sampled`` see :func:`.known_ids`."""
    bucket, device = step.bucket, model.runtime.mesh.device
    assert bucket is not None
    rows = StaticRows.of(bucket, bucket.rows_per_request, model, cache)
    shape = cache.block_tables.shape(bucket.requests, bucket.context)
    tables = block_tables_of(step.of_group or [step.own.chunks], cache, shape)
    ids = known_ids(step.own.token_ids(bucket.rows), sampled, device)
    return rows.batch(tables, upload(step.own.positions, device), ids)


def chunk_columns(chunks: Sequence[Chunk], page_size: int, rows: int) -> torch.Tensor:
    """A rank's chunks in a decode step, int64 ``[chunks, 3 + rows]`` on the host, for :meth:`StepRows.of`. The columns:
    position of the first row; number of rows; limit of the tokens that may be computed, which have pages and are not
    the request's very last; token of each row, 0 for padding or if only the device knows it.
    """
    table = []
    for chunk in chunks:
        request = chunk.request
        limit = min(len(request.pages) * page_size, len(request.prompt) + request.max_tokens - 1)
        ids = () if chunk.starts_on_device else request.tokens(chunk.start, chunk.length)
        table.append([chunk.start, chunk.length, limit, *ids, *[0] * (rows - len(ids))])
    return torch.tensor(table, dtype=torch.int64).view(-1, 3 + rows)


class StepRows(NamedTuple):
    """The rows of a decode step, ``1 + count`` for each of this rank's requests; int64."""

    batch: ForwardBatch
    first: torch.Tensor  # [requests], position of the first row
    limit: torch.Tensor  # [requests], tokens that may be computed
    token_ids: torch.Tensor  # [requests, 1 + count], 0 for padding
    positions: torch.Tensor  # [requests, 1 + count], -1 for padding
    offered: torch.Tensor  # [requests], number of drafts to verify

    @classmethod
    def of(
        cls,
        first: torch.Tensor,
        length: torch.Tensor,
        limit: torch.Tensor,
        token_ids: torch.Tensor,
        rows: StaticRows,
        tables: torch.Tensor,
    ) -> StepRows:
        """From the columns of :func:`chunk_columns`; ``tables``: :func:`block_tables_of`."""
        positions = first[:, None] + rows.offsets
        token_mask = (rows.offsets < length[:, None]) & (positions < limit[:, None])
        at = positions.where(token_mask, -1)
        batch = rows.batch(tables, at.flatten(), token_ids.flatten())
        return cls(batch, first, limit, token_ids, at, token_mask[:, 1:].sum(dim=1))
