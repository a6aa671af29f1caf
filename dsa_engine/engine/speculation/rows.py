"""Rows of static shape: the same number for every request, at positions that only the device knows.

The position of the next drafts depends on how many were accepted. So positions, slots and RoPE angles are computed on
the device, without waiting, and passes over these rows can be part of a CUDA graph. A row without a page, or of no
request, is padding and has position -1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from dsa_engine.engine.requests.request import Chunk, LastRows, Request
from dsa_engine.engine.steps.plan import Bucket, RankPlan
from dsa_engine.kernels.rows.segment import Segment, Segments
from dsa_engine.kernels.rows.slots_of import slots_of
from dsa_engine.model.forward_batch import ForwardBatch, MicroBatchPair
from dsa_engine.model.model import Model


@dataclass(frozen=True)
class StaticRows:
    """``each`` rows of every request of a bucket; makes batches of them on the device.

    Attributes:
        micro_batches: those of the first and the second half of the requests, if the step is cut.
    """

    each: int
    segments: Segments  # on the host rows see their maximum; on the device each batch writes what they see
    none: Segments
    sequences: torch.Tensor  # [requests · each] int64, rows of the block tables
    offsets: torch.Tensor  # [each] int64: 0, 1, …
    frequencies: torch.Tensor
    micro_batches: tuple[StaticRows, ...] = ()

    @classmethod
    def of(
        cls, bucket: Bucket, each: int, model: Model, max_visible: Sequence[int] = (), is_cut: bool = False
    ) -> StaticRows:
        """``max_visible``: maximum number of tokens that each request's rows see; default: the bucket's context.
        ``is_cut``: in two micro-batches."""
        device = model.runtime.mesh.device
        visible = max_visible or [bucket.context] * bucket.requests
        segments = [Segment(i * each, each, i, max(0, tokens - each)) for i, tokens in enumerate(visible)]
        whole, micro_bucket = Segments.of(segments, device), replace(bucket, requests=bucket.requests // 2)
        seen = whole.visible.chunk(2) if is_cut else ()
        micro_batches = tuple(cls.of(micro_bucket, each, model)._reading(visible) for visible in seen)
        return cls(
            each,
            whole,
            Segments.of([], device),
            torch.arange(bucket.requests, device=device).repeat_interleave(each),
            torch.arange(each, device=device),
            model.config.rope.inverse_frequencies().to(device),
            micro_batches,
        )

    def batch(
        self, model: Model, page_size: int, tables: torch.Tensor, positions: torch.Tensor, input_ids: torch.Tensor
    ) -> ForwardBatch:
        """The batch of these rows; always the same launches.

        Args:
            tables: block tables ``[requests, pages]``.
            positions: int64 ``[requests · each]``, -1 for padding.
            input_ids: int64 ``[requests · each]``.
        """
        count, selects = len(positions), model.config.has_indexer
        cos, sin = model.config.rope.cos_sin(positions.clamp(min=0), self.frequencies)
        self.segments.visible.copy_(positions + 1)
        whole = ForwardBatch(
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
            token_mask=positions >= 0,
        )
        return replace(whole, micro_batches=self._micro_batches_of(whole, selects)) if self.micro_batches else whole

    def _reading(self, visible: torch.Tensor) -> StaticRows:
        """The same, if another batch writes what the rows see."""
        return replace(self, segments=replace(self.segments, visible=visible))

    def _micro_batches_of(self, whole: ForwardBatch, selects: bool) -> MicroBatchPair:
        """The rows of the first requests of a batch and of the others; all are views."""

        def micro_batch(number: int) -> ForwardBatch:
            segments, count, token_mask = self.micro_batches[number].segments, whole.rows // 2, whole.token_mask
            assert token_mask is not None
            return replace(
                whole,
                rows=count,
                input_ids=whole.input_ids.chunk(2, dim=1)[number],
                cos=whole.cos.chunk(2)[number],
                sin=whole.sin.chunk(2)[number],
                dense_mqa=self.none if selects else segments,
                sparse_mqa=segments if selects else self.none,
                block_tables=whole.block_tables.chunk(2)[number],
                slot_mapping=whole.slot_mapping.chunk(2)[number],
                cp_rows=count,
                tp_rows=count,
                ep_rows=count,
                token_mask=token_mask.chunk(2)[number],
            )

        return MicroBatchPair((micro_batch(0), micro_batch(1)), None)


class ChunkColumns(NamedTuple):
    """A rank's chunks in a decode step, as columns of a table of n requests; int64."""

    first: torch.Tensor  # [n], position of the first row
    length: torch.Tensor  # [n], number of rows
    limit: torch.Tensor  # [n], tokens that may be computed: they have pages, and are not the request's very last
    ids: torch.Tensor  # [n, rows]: token of each row; 0 for padding, or if only the device knows it

    @classmethod
    def of(cls, table: torch.Tensor) -> ChunkColumns:
        """Views of ``table [n, 3 + rows]``."""
        return cls(table[:, 0], table[:, 1], table[:, 2], table[:, 3:])

    @staticmethod
    def on_host(chunks: Sequence[Chunk], page_size: int, rows: int, requests: int) -> torch.Tensor:
        """The table ``[requests, 3 + rows]`` of these chunks, padded with zeros."""
        table = [[0] * (3 + rows) for _ in range(requests)]
        for i, chunk in enumerate(chunks):
            request = chunk.request
            limit = min(len(request.pages) * page_size, len(request.prompt) + request.max_tokens - 1)
            ids = () if chunk.starts_on_device else request.tokens(chunk.start, chunk.length)
            table[i][: 3 + len(ids)] = [chunk.start, chunk.length, limit, *ids]
        return torch.tensor(table, dtype=torch.int64)


class StepRows(NamedTuple):
    """The rows of a decode step, ``1 + count`` for each of this rank's requests; int64."""

    batch: ForwardBatch
    chunks: ChunkColumns
    positions: torch.Tensor  # [requests, 1 + count], -1 for padding
    offered: torch.Tensor  # [requests], number of drafts to verify

    @classmethod
    def of(
        cls, columns: ChunkColumns, rows: StaticRows, tables: torch.Tensor, model: Model, page_size: int
    ) -> StepRows:
        """``tables``: block tables ``[requests, pages]``."""
        positions = columns.first[:, None] + rows.offsets
        token_mask = (rows.offsets < columns.length[:, None]) & (positions < columns.limit[:, None])
        at = positions.where(token_mask, -1)
        batch = rows.batch(model, page_size, tables, at.flatten(), columns.ids.flatten())
        return cls(batch, columns, at, token_mask[:, 1:].sum(dim=1))


@dataclass(frozen=True)
class PassBuffers:
    """Tensors of a bucket's passes with fixed addresses."""

    rows: StaticRows  # the rows of a pass
    before: LastRows  # [requests, saved, …]: ``Request.last_rows`` before the step
    after: LastRows  # the same after the step

    @classmethod
    def of(cls, bucket: Bucket, each: int, saved: int, model: Model, max_visible: Sequence[int] = ()) -> PassBuffers:
        """``each``: rows of a request in a pass; ``saved``: positions of ``last_rows``; see also
        :meth:`StaticRows.of`."""
        shape, device = (bucket.requests, saved), model.runtime.mesh.device
        states = torch.zeros(*shape, model.config.hidden_size, dtype=model.runtime.dtype, device=device)
        before = LastRows(states, torch.zeros(shape, dtype=torch.int64, device=device))
        return cls(StaticRows.of(bucket, each, model, max_visible), before, LastRows(*map(torch.empty_like, before)))

    def load(self, last_rows: Sequence[LastRows | None]) -> None:
        """Sets ``before`` from this rank's requests; None for a request whose prompt was never computed."""
        if last_rows and self.before.tokens.numel():
            none = LastRows(*(torch.zeros_like(part[0]) for part in self.before))
            for parts, out in zip(zip(*(rows or none for rows in last_rows), strict=True), self.before, strict=True):
                torch.stack(parts, out=out[: len(last_rows)])

    def last_rows(self, chunks: Sequence[Chunk]) -> Mapping[Request, LastRows]:
        """The new ``Request.last_rows`` of these chunks, from ``after``."""
        if not self.after.tokens.numel():
            return {}
        states, tokens = (part[: len(chunks)].clone() for part in self.after)
        return {chunk.request: LastRows(states[i], tokens[i]) for i, chunk in enumerate(chunks)}


def chunks_with_logits(plan: RankPlan) -> list[Chunk]:
    """A rank's rows with logits, as a chunk for each request, in the order of the sampler."""
    wanted = {request for request, *_ in plan.wanted}
    chunks = [chunk for chunk in plan.chunks if chunk.request in wanted]
    return [replace(c, start=c.end - c.num_logits, length=c.num_logits) for c in chunks]
