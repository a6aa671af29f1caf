"""The draft passes of a padded step: static shapes, so that all of them are one CUDA graph.

Where a request's drafts begin depends on how many were accepted, which the device alone knows when the passes are
launched: so the positions, slots and angles of their rows are computed there. Every request of the bucket has one row
in each pass. A row that has no page, or belongs to no request, is padding.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from dsa_engine.engine.batch import Bucket, StepPlan
from dsa_engine.engine.decode_graphs import DecodeGraphs
from dsa_engine.engine.request import Request
from dsa_engine.kernels.paged import slots_of
from dsa_engine.kernels.segment import Segment, Segments
from dsa_engine.kernels.transfer import upload
from dsa_engine.model.forward_batch import ForwardBatch
from dsa_engine.model.kv_cache import KVCache
from dsa_engine.model.model import Model
from dsa_engine.parallel import Mesh


@dataclass
class _Buffers:
    """What stays of a bucket from step to step; the first four are written anew in every step."""

    input_ids: torch.Tensor  # [tp_size, tp_rows] int64, of the pass over the step's own rows
    last: torch.Tensor  # [requests] int64: the row of each behind which tokens are drafted
    positions: torch.Tensor  # [requests] int64, of these rows
    limits: torch.Tensor  # [requests] int64: tokens for which each has pages; 0 of padding
    numbers: torch.Tensor  # [requests] int64: 0, 1, …
    rows: Segments  # one of every request; what they see is written anew in every pass
    none: Segments


class PaddedDrafts:
    """Runs the draft passes of padded steps.

    Args:
        model, cache, mesh: of the engine.
    """

    def __init__(self, model: Model, cache: KVCache, mesh: Mesh):
        self._model = model
        self._cache = cache
        self._mesh = mesh
        self._frequencies = model.config.rope.inverse_frequencies().to(mesh.device)
        self._buffers: dict[Bucket, _Buffers] = {}

    def draft(
        self,
        step: StepPlan,
        batch: ForwardBatch,
        hidden: torch.Tensor,
        input_ids: torch.Tensor,
        accepted: torch.Tensor,
        order: Mapping[Request, int],
        graphs: DecodeGraphs,
    ) -> torch.Tensor:
        """Drafts for all requests of all ranks.

        Args:
            step, batch: of the padded step; ``batch`` and ``hidden [rows, hidden]`` stay where they are.
            input_ids: ``[tp_size, tp_rows]``, the tokens behind the step's rows.
            accepted: int64 ``[requests that are sampled]`` of all ranks.
            order: where each of them stands in ``accepted``.
            graphs: captures and replays the passes.

        Returns:
            int64 ``[ranks · requests of the bucket, rows a request - 1]``, valid until the next call.
        """
        bucket, device = step.bucket, self._mesh.device
        assert bucket is not None, "a step is padded before it is run here"
        buffers = self._buffers.get(bucket)
        if buffers is None:
            buffers = self._buffers[bucket] = _buffers(bucket, input_ids, device)
        buffers.input_ids.copy_(input_ids)
        table = [[i * bucket.rows_per_request, 0, 0, 0, 0] for i in range(bucket.requests)]
        for i, chunk in enumerate(step.ranks[self._mesh.rank].chunks):
            behind = chunk.length - max(1, chunk.num_logits)  # rows before the first that is sampled
            sampled = int(chunk.request in order)
            pages = len(chunk.request.pages) * self._cache.page_size
            table[i][0] += behind
            table[i][1:] = chunk.start + behind, order.get(chunk.request, 0), sampled, pages * sampled
        row, position, index, sampled, limit = upload(torch.tensor(table).T.contiguous(), device)
        more = accepted[index] * sampled
        buffers.last.copy_(row + more)
        buffers.positions.copy_(position + more)
        buffers.limits.copy_(limit)
        count = bucket.rows_per_request - 1
        return graphs.run(("drafts", bucket), lambda: self._passes(buffers, batch, hidden, count))

    def _passes(self, buffers: _Buffers, batch: ForwardBatch, hidden: torch.Tensor, count: int) -> torch.Tensor:
        passed_on = self._model.draft(0, hidden, replace(batch, input_ids=buffers.input_ids), self._cache)
        state = passed_on[buffers.last]
        drafts: list[torch.Tensor] = []
        for number in range(count):
            if number:
                state = self._model.draft(0, state, self._rows_behind(buffers, batch, drafts[-1], number), self._cache)
            drafts.append(self._model.own_logits(state, state.shape[0], 0).argmax(dim=-1))
        return self._mesh.world.all_gather(torch.stack(drafts, dim=1))

    def _rows_behind(self, buffers: _Buffers, batch: ForwardBatch, tokens: torch.Tensor, number: int) -> ForwardBatch:
        """One row of every request, ``number`` behind the last of the step; it embeds ``tokens [requests]``."""
        count, selects = len(tokens), self._model.config.has_indexer
        positions = buffers.positions + number
        live = positions < buffers.limits
        positions = positions.where(live, -1)
        cos, sin = self._model.config.rope.cos_sin(positions.clamp(min=0), self._frequencies)
        buffers.rows.visible.copy_(positions + 1)
        return ForwardBatch(
            rows=count,
            input_ids=self._mesh.tp.all_gather(tokens).view(-1, count),
            cos=cos,
            sin=sin,
            mha=None,
            dense_mqa=buffers.none if selects else buffers.rows,
            sparse_mqa=buffers.rows if selects else buffers.none,
            block_tables=batch.block_tables,
            slot_mapping=slots_of(positions, batch.block_tables, buffers.numbers, self._cache.page_size),
            gathers=False,
            cp_rows=count,
            tp_rows=count,
            ep_rows=count,
            decodes=True,
            live=live,
        )


def _buffers(bucket: Bucket, input_ids: torch.Tensor, device: torch.device) -> _Buffers:
    def numbers() -> torch.Tensor:
        return torch.zeros(bucket.requests, dtype=torch.int64, device=device)

    each = [Segment(i, 1, i, bucket.context - 1) for i in range(bucket.requests)]
    return _Buffers(
        input_ids=torch.empty_like(input_ids),
        last=numbers(),
        positions=numbers(),
        limits=numbers(),
        numbers=torch.arange(bucket.requests, device=device),
        rows=Segments.of(each, device),
        none=Segments.of([], device),
    )
