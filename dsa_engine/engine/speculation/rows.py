"""Rows of static shape: the same number of every request, at positions that the device alone needs to know.

Where drafts begin depends on how many were accepted. So the positions, slots and angles of the rows behind a decode
step are computed on the device: nothing is waited for, and the passes may be part of a CUDA graph. A row without a
page, or of no request, is padding: it has position -1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from dsa_engine.engine.request import Chunk, LastRows, Request
from dsa_engine.engine.step_plan import Bucket
from dsa_engine.kernels.paged import slots_of
from dsa_engine.kernels.segment import Segment, Segments
from dsa_engine.model.forward_batch import ForwardBatch
from dsa_engine.model.kv_cache import KVCache
from dsa_engine.model.model import Model


@dataclass(frozen=True)
class StaticRows:
    """``each`` rows of every request of a bucket, of which batches are made on the device."""

    each: int
    segments: Segments  # on the host they see the whole context; on the device what they do see, written by every batch
    none: Segments
    sequences: torch.Tensor  # [requests · each] int64, rows of the block tables
    offsets: torch.Tensor  # [each] int64: 0, 1, …
    frequencies: torch.Tensor

    @classmethod
    def of(cls, bucket: Bucket, each: int, model: Model) -> StaticRows:
        device = model.runtime.mesh.device
        segments = [Segment(i * each, each, i, bucket.context - each) for i in range(bucket.requests)]
        return cls(
            each,
            Segments.of(segments, device),
            Segments.of([], device),
            torch.arange(bucket.requests, device=device).repeat_interleave(each),
            torch.arange(each, device=device),
            model.config.rope.inverse_frequencies().to(device),
        )

    def batch(
        self, model: Model, cache: KVCache, tables: torch.Tensor, positions: torch.Tensor, input_ids: torch.Tensor
    ) -> ForwardBatch:
        """The batch of these rows, by launches that are always the same.

        Args:
            tables: block tables ``[requests, pages]``.
            positions: int64 ``[requests · each]``, -1 of padding.
            input_ids: int64 ``[requests · each]``.
        """
        count, selects = len(positions), model.config.has_indexer
        cos, sin = model.config.rope.cos_sin(positions.clamp(min=0), self.frequencies)
        self.segments.visible.copy_(positions + 1)
        return ForwardBatch(
            rows=count,
            input_ids=model.runtime.mesh.tp.all_gather(input_ids).view(-1, count),
            cos=cos,
            sin=sin,
            mha=None,
            dense_mqa=self.none if selects else self.segments,
            sparse_mqa=self.segments if selects else self.none,
            block_tables=tables,
            slot_mapping=slots_of(positions, tables, self.sequences, cache.page_size),
            gathers=False,
            cp_rows=count,
            tp_rows=count,
            ep_rows=count,
            decodes=True,
            live=positions >= 0,
        )


class ChunkColumns(NamedTuple):
    """The chunks of a rank in a decode step, as columns of a table of n requests; int64, on one device."""

    first: torch.Tensor  # [n], position of the first row
    length: torch.Tensor  # [n], rows
    limit: torch.Tensor  # [n], tokens that may be computed: those with pages, but for the last that may be sampled
    ids: torch.Tensor  # [n, rows]: the token of each row, 0 after the last

    @classmethod
    def of(cls, table: torch.Tensor) -> ChunkColumns:
        """Views of ``table [3 + rows, n]``."""
        first, length, limit = table[:3]
        return cls(first, length, limit, table[3:].T)

    @staticmethod
    def on_host(chunks: Sequence[Chunk], page_size: int, rows: int, requests: int) -> torch.Tensor:
        """The table ``[3 + rows, requests]`` of these chunks; the tokens of one that follows are not known, and 0. Zeros
        after the last chunk: padding."""
        table = torch.zeros(requests, 3 + rows, dtype=torch.int64)
        for i, chunk in enumerate(chunks):
            ids = [] if chunk.follows else chunk.request.tokens(chunk.start, chunk.length)
            numbers = [chunk.start, chunk.length, computable_tokens(chunk.request, page_size), *ids]
            table[i, : len(numbers)] = torch.tensor(numbers)
        return table.T


def computable_tokens(request: Request, page_size: int) -> int:
    """How many tokens of a request have pages on this rank and are not the last that it may get."""
    return min(len(request.pages) * page_size, len(request.prompt) + request.max_tokens - 1)


def verifies(chunk: Chunk, count: int) -> bool:
    """Whether a request decodes, and all rows of the chunk are its last token and up to ``count`` drafts."""
    return chunk.start >= chunk.request.num_prefill_tokens and chunk.num_logits == chunk.length <= 1 + count


class StepRows(NamedTuple):
    """The rows of a decode step, ``1 + count`` of each of this rank's requests."""

    batch: ForwardBatch
    first: torch.Tensor  # [requests] int64, position of the first row
    positions: torch.Tensor  # [requests, 1 + count] int64, -1 of padding
    limit: torch.Tensor  # [requests] int64, see ChunkColumns
    ids: torch.Tensor  # [requests, 1 + count] int64
    offered: torch.Tensor  # [requests] int64, drafts that are verified

    @classmethod
    def of(
        cls, columns: ChunkColumns, rows: StaticRows, tables: torch.Tensor, model: Model, cache: KVCache
    ) -> StepRows:
        """``tables``: block tables ``[requests, pages]``."""
        positions = columns.first[:, None] + rows.offsets
        live = (rows.offsets < columns.length[:, None]) & (positions < columns.limit[:, None])
        at = positions.where(live, -1)
        batch = rows.batch(model, cache, tables, at.flatten(), columns.ids.flatten())
        return cls(batch, columns.first, at, columns.limit, columns.ids, live[:, 1:].sum(dim=1))


@dataclass(frozen=True)
class PassBuffers:
    """What the passes of a bucket work in, from step to step."""

    rows: StaticRows  # of a pass
    before: LastRows  # [requests, kept, …]: what requests keep (``Request.last_rows``) of positions before the step's
    after: LastRows  # … before those of the next step

    @classmethod
    def of(cls, bucket: Bucket, each: int, kept: int, model: Model) -> PassBuffers:
        """``each``: rows of a request in a pass. ``kept``: positions that a request keeps."""
        shape, device = (bucket.requests, kept), model.runtime.mesh.device
        states = torch.zeros(*shape, model.config.hidden_size, dtype=model.runtime.dtype, device=device)
        tokens = torch.zeros(shape, dtype=torch.int64, device=device)
        after = LastRows(torch.empty_like(states), torch.empty_like(tokens))
        return cls(StaticRows.of(bucket, each, model), LastRows(states, tokens), after)

    def load(self, chunks: Sequence[Chunk]) -> None:
        """Takes what this rank's requests have kept; before the passes."""
        if not chunks or not self.before.tokens.numel():
            return
        none = LastRows(*(torch.zeros_like(part[0]) for part in self.before))  # of a prompt that was never computed
        kept = [none if chunk.request.last_rows is None else chunk.request.last_rows for chunk in chunks]
        torch.stack([rows.states for rows in kept], out=self.before.states[: len(chunks)])
        torch.stack([rows.tokens for rows in kept], out=self.before.tokens[: len(chunks)])

    def kept(self, chunks: Sequence[Chunk]) -> Mapping[Request, LastRows]:
        """What they are to keep; after the passes."""
        if not self.after.tokens.numel():
            return {}
        states, tokens = (part[: len(chunks)].clone() for part in self.after)
        return {chunk.request: LastRows(states[i], tokens[i]) for i, chunk in enumerate(chunks)}
