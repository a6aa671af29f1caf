"""Rows of static shape: the same number for every request, at positions that are on the device.

The position of the next drafts depends on how many were accepted. So positions, slots and RoPE angles are computed on
the device, without waiting, and passes over these rows can be part of a CUDA graph. A row without a page, or of no
request, is padding and has position -1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch

from dsa_engine.engine.requests.request import Chunk
from dsa_engine.engine.steps.context_buckets import Bucket
from dsa_engine.kernels.rows.segment import Segment, Segments, slots_of
from dsa_engine.model.forward_batch import BlockTables, ForwardBatch, MicroBatchPair
from dsa_engine.model.model import Model


@dataclass(frozen=True)
class StaticRows:
    """``each`` rows of every request of a bucket; makes batches of them on the device."""

    model: Model
    page_size: int
    each: int
    is_cut: bool  # whether batches have two micro-batches, each of half of the requests
    segments: Segments  # on the host rows see their maximum; on the device each batch writes what they see
    offsets: torch.Tensor  # [each] int64: 0, 1, …
    frequencies: torch.Tensor

    @classmethod
    def of(cls, bucket: Bucket, each: int, model: Model, page_size: int, max_visible: Sequence[int] = ()) -> StaticRows:
        """``max_visible``: maximum number of tokens that each request's rows see; default: the bucket's context."""
        device = model.runtime.mesh.device
        visible = max_visible or [bucket.context] * bucket.requests
        segments = [Segment(i * each, each, i, max(0, tokens - each)) for i, tokens in enumerate(visible)]
        return cls(
            model,
            page_size,
            each,
            bucket.is_cut,
            Segments.of(segments, device),
            torch.arange(each, device=device),
            model.config.rope.inverse_frequencies.to(device),
        )

    def batch(self, tables: torch.Tensor, positions: torch.Tensor, input_ids: torch.Tensor) -> ForwardBatch:
        """The batch of these rows, by always the same launches: from block tables, int32 ``[requests, pages]``, and
        positions and ids, int64 ``[requests · each]``, positions -1 for padding."""
        config, rows = self.model.config, len(positions)
        cos, sin = config.rope.cos_sin(positions.clamp(min=0), self.frequencies)
        at = positions.int()  # as the CPU's kernel of slots takes them
        torch.add(at, 1, out=self.segments.visible)
        ids = self.model.runtime.mesh.tp.all_gather(input_ids).view(-1, rows)
        slots, token_mask = slots_of(at, tables, self.segments.sequences, self.page_size), positions >= 0

        def part(first: int, last: int) -> ForwardBatch:
            count, seen, none = last - first, self.segments.part(first, last), self.segments.part(0, 0)
            return ForwardBatch(
                rows=count,
                input_ids=ids[:, first:last],
                cos=cos[first:last],
                sin=sin[first:last],
                mha=None,
                dense_mqa=none if config.has_indexer else seen,
                sparse_mqa=seen if config.has_indexer else none,
                block_tables=tables,
                slot_mapping=slots[first:last],
                gathers=False,
                cp_rows=count,
                tp_rows=count,
                ep_rows=count,
                decodes=True,
                token_mask=token_mask[first:last],
            )

        if not self.is_cut:
            return part(0, rows)
        halves = partial(part, 0, rows // 2), partial(part, rows // 2, rows)
        return replace(part(0, rows), micro_batches=MicroBatchPair(halves, None))


def block_tables_of(
    chunks: Sequence[Chunk], tables: BlockTables, shape: Sequence[int], out: torch.Tensor | None = None
) -> torch.Tensor:
    """The block tables of these chunks on the device, int32 of ``shape`` ``[requests, pages]``; those of padding are
    some request's: nothing that is read there counts."""
    rows = tables.rows([chunk.request.pages for chunk in chunks])
    return tables.gather(rows + [0] * (shape[0] - len(rows)), shape[1], out)


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
        """From the columns of :func:`chunk_columns`; ``tables``: block tables, int32 ``[requests, pages]``."""
        positions = first[:, None] + rows.offsets
        token_mask = (rows.offsets < length[:, None]) & (positions < limit[:, None])
        at = positions.where(token_mask, -1)
        batch = rows.batch(tables, at.flatten(), token_ids.flatten())
        return cls(batch, first, limit, token_ids, at, token_mask[:, 1:].sum(dim=1))
