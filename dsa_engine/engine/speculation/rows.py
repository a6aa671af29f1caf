"""Rows of static shape: the same number of every request, at positions that the device alone needs to know.

Where drafts begin depends on how many were accepted. So positions, slots and angles of the rows after a decode step are
computed on the device: nothing is waited for, and the passes over them may be part of a CUDA graph. A row without a
page, or of no request, is padding: it has position -1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from dsa_engine.engine.requests.request import Chunk, LastRows, Request
from dsa_engine.engine.steps.plan import Bucket, StepPlan
from dsa_engine.kernels.rows.segment import Segment, Segments
from dsa_engine.kernels.rows.slots_of import slots_of
from dsa_engine.model.forward_batch import ForwardBatch
from dsa_engine.model.model import Model


@dataclass(frozen=True)
class StaticRows:
    """``each`` rows of every request of a bucket, of which batches are made on the device."""

    each: int
    # On the host they see as much as they may; on the device what they do, written by every batch.
    segments: Segments
    none: Segments
    sequences: torch.Tensor  # [requests · each] int64, rows of the block tables
    offsets: torch.Tensor  # [each] int64: 0, 1, …
    frequencies: torch.Tensor

    @classmethod
    def of(cls, bucket: Bucket, each: int, model: Model, ends: Sequence[int] = ()) -> StaticRows:
        """``ends``: how many tokens the rows of each request may see; by default the bucket's context."""
        device = model.runtime.mesh.device
        seen = ends or [bucket.context] * bucket.requests
        segments = [Segment(i * each, each, i, max(0, end - each)) for i, end in enumerate(seen)]
        return cls(
            each,
            Segments.of(segments, device),
            Segments.of([], device),
            torch.arange(bucket.requests, device=device).repeat_interleave(each),
            torch.arange(each, device=device),
            model.config.rope.inverse_frequencies().to(device),
        )

    def batch(
        self, model: Model, page_size: int, tables: torch.Tensor, positions: torch.Tensor, input_ids: torch.Tensor
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
            slot_mapping=slots_of(positions, tables, self.sequences, page_size),
            gathers=False,
            cp_rows=count,
            tp_rows=count,
            ep_rows=count,
            decodes=True,
            live=positions >= 0,
        )


class ChunkColumns(NamedTuple):
    """The chunks of a rank in a decode step, as columns of a table of n requests; int64."""

    first: torch.Tensor  # [n], position of the first row
    length: torch.Tensor  # [n], rows
    limit: torch.Tensor  # [n], tokens that may be computed: they have pages, and are not the last that may be sampled
    ids: torch.Tensor  # [n, rows]: the token of each row; 0 where there is none, or the device alone knows it

    @classmethod
    def of(cls, table: torch.Tensor) -> ChunkColumns:
        """Views of ``table [n, 3 + rows]``."""
        return cls(table[:, 0], table[:, 1], table[:, 2], table[:, 3:])

    @staticmethod
    def on_host(chunks: Sequence[Chunk], page_size: int, rows: int, requests: int) -> torch.Tensor:
        """The table ``[requests, 3 + rows]`` of these chunks; after the last one zeros, which are padding."""
        table = [[0] * (3 + rows) for _ in range(requests)]
        for i, chunk in enumerate(chunks):
            request = chunk.request
            limit = min(len(request.pages) * page_size, len(request.prompt) + request.max_tokens - 1)
            ids = [] if chunk.starts_on_device else request.tokens(chunk.start, chunk.length)
            table[i][: 3 + len(ids)] = [chunk.start, chunk.length, limit, *ids]
        return torch.tensor(table, dtype=torch.int64)


class StepRows(NamedTuple):
    """The rows of a decode step, ``1 + count`` of each of this rank's requests; int64."""

    batch: ForwardBatch
    chunks: ChunkColumns
    positions: torch.Tensor  # [requests, 1 + count], -1 of padding
    offered: torch.Tensor  # [requests], drafts that are verified

    @classmethod
    def of(
        cls, columns: ChunkColumns, rows: StaticRows, tables: torch.Tensor, model: Model, page_size: int
    ) -> StepRows:
        """``tables``: block tables ``[requests, pages]``."""
        positions = columns.first[:, None] + rows.offsets
        live = (rows.offsets < columns.length[:, None]) & (positions < columns.limit[:, None])
        at = positions.where(live, -1)
        batch = rows.batch(model, page_size, tables, at.flatten(), columns.ids.flatten())
        return cls(batch, columns, at, live[:, 1:].sum(dim=1))


@dataclass(frozen=True)
class PassBuffers:
    """What the passes of a bucket work in, from step to step."""

    rows: StaticRows  # of a pass
    before: LastRows  # [requests, kept, …]: what requests keep (``Request.last_rows``) of positions before the step's
    after: LastRows  # … before those of the next step

    @classmethod
    def of(cls, bucket: Bucket, each: int, kept: int, model: Model, ends: Sequence[int] = ()) -> PassBuffers:
        """``each``: rows of a request in a pass. ``kept``: positions that a request keeps. ``ends``: as of
        :meth:`StaticRows.of`."""
        shape, device = (bucket.requests, kept), model.runtime.mesh.device
        states = torch.zeros(*shape, model.config.hidden_size, dtype=model.runtime.dtype, device=device)
        before = LastRows(states, torch.zeros(shape, dtype=torch.int64, device=device))
        return cls(StaticRows.of(bucket, each, model, ends), before, LastRows(*map(torch.empty_like, before)))

    def load(self, kept: Sequence[LastRows | None]) -> None:
        """Takes what this rank's requests have kept; before the passes. None of a prompt that was never computed."""
        if kept and self.before.tokens.numel():
            none = LastRows(*(torch.zeros_like(part[0]) for part in self.before))
            for parts, out in zip(zip(*(rows or none for rows in kept), strict=True), self.before, strict=True):
                torch.stack(parts, out=out[: len(kept)])

    def kept(self, chunks: Sequence[Chunk]) -> Mapping[Request, LastRows]:
        """What they are to keep; after the passes."""
        if not self.after.tokens.numel():
            return {}
        states, tokens = (part[: len(chunks)].clone() for part in self.after)
        return {chunk.request: LastRows(states[i], tokens[i]) for i, chunk in enumerate(chunks)}


def chunks_with_logits(step: StepPlan) -> list[list[Chunk]]:
    """The rows of each rank for which the step chooses tokens, a chunk of each request, in the order of the sampler."""
    by_rank = []
    for rank, plan in enumerate(step.ranks):
        wanted, ranks = {request for _, request in plan.logits_rows}, range(rank, rank + 1)
        chunks = [chunk for chunk in plan.chunks if chunk.request in wanted]
        by_rank.append([replace(c, start=c.end - c.num_logits, length=c.num_logits, ranks=ranks) for c in chunks])
    return by_rank


def gathered_rows(by_rank: list[list[Chunk]], each: int) -> dict[Request, int]:
    """Where the row of each request lies once the tables of all ranks, of ``each`` rows, are gathered."""
    return {chunk.request: rank * each + i for rank, chunks in enumerate(by_rank) for i, chunk in enumerate(chunks)}
