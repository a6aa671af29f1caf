"""Vanilla mode behind a padded step: the passes of all modules in static shapes, so that they are one CUDA graph.

The rows are those of ``vanilla_drafts.py``: of a request with the first row at position p, the ``count - 1`` positions
before p and its own ``1 + count`` rows, ``2 · count`` in all. In a request's first tokens fewer lie before: its rows
begin at position 0, and those left over at the end are padding. Positions, slots, angles and tokens follow on the
device from the step's own batch, from what was sampled and from how much of it was accepted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from dsa_engine.engine.batch import Bucket, StepPlan
from dsa_engine.engine.decode_graphs import DecodeGraphs
from dsa_engine.engine.request import Chunk, Request
from dsa_engine.engine.sampler import Samples
from dsa_engine.kernels.paged import slots_of
from dsa_engine.kernels.segment import Segment, Segments
from dsa_engine.kernels.transfer import upload
from dsa_engine.model.forward_batch import ForwardBatch
from dsa_engine.model.kv_cache import KVCache
from dsa_engine.model.model import Model
from dsa_engine.parallel import Mesh


@dataclass
class _Buffers:
    """What stays of a bucket from step to step; all but the last two are written anew in every step."""

    accepted: torch.Tensor  # [requests] int64
    tokens: torch.Tensor  # [requests, 1 + 2 · count] int64: up to the first row's, then what was sampled
    before: torch.Tensor  # [requests, count - 1, hidden]: the model's states before the first row
    kept: torch.Tensor  # … before the first row of the next step
    rows: Segments  # on the host they see the whole context, on the device what they do see
    numbers: torch.Tensor  # [rows] int64, the request of each


class PaddedVanillaDrafts:
    """Runs the modules behind padded steps.

    Args:
        model, cache, mesh: of the engine.
    """

    def __init__(self, model: Model, cache: KVCache, mesh: Mesh):
        self._model = model
        self._cache = cache
        self._mesh = mesh
        self._frequencies = model.config.rope.inverse_frequencies().to(mesh.device)
        self._buffers: dict[Bucket, _Buffers] = {}

    def runs(self, step: StepPlan, count: int) -> bool:
        """Whether it is a padded step of requests that decode one token and verify up to ``count`` drafts."""
        chunks = [chunk for plan in step.ranks for chunk in plan.chunks]
        bucket = step.bucket
        return bucket is not None and bucket.rows_per_request == 1 + count and all(map(_verifies, chunks))

    def draft(
        self,
        step: StepPlan,
        batch: ForwardBatch,
        hidden: torch.Tensor,
        samples: Samples,
        accepted: torch.Tensor,
        graphs: DecodeGraphs,
    ) -> tuple[torch.Tensor, Mapping[Request, torch.Tensor]]:
        """Drafts for all requests of all ranks; nothing waits for the device.

        Args:
            step, batch, hidden: of the padded step; ``batch`` and ``hidden [rows, hidden]`` stay where they are.
            samples: what was sampled from it.
            accepted: int64 ``[requests that are sampled]``.
            graphs: captures and replays the passes.

        Returns:
            int64 ``[ranks · requests of the bucket, count]``, valid until the next call, and ``Request.last_states`` of
            this rank's.
        """
        bucket = step.bucket
        assert bucket is not None
        count, chunks = bucket.rows_per_request - 1, step.ranks[self._mesh.rank].chunks
        buffers = self._buffers.get(bucket)
        if buffers is None:
            buffers = self._buffers[bucket] = self._make_buffers(bucket, hidden)
        if chunks:
            self._write(buffers, chunks, samples, accepted, count)
        drafts = graphs.run(("drafts", bucket), lambda: self._passes(buffers, batch, hidden, count))
        kept = buffers.kept[: len(chunks)].clone()
        return drafts, {chunk.request: kept[i] for i, chunk in enumerate(chunks)}

    def _write(
        self, buffers: _Buffers, chunks: list[Chunk], samples: Samples, accepted: torch.Tensor, count: int
    ) -> None:
        """Fills the rows of this rank's requests; the others are padding and hold anything."""
        order = {request: i for i, request in enumerate(samples.indices)}
        table = []
        for chunk in chunks:
            request, first = chunk.request, max(0, chunk.start - count + 1)
            known = request.tokens(first, chunk.start + 1 - first)
            where = samples.indices[request]
            sampled = [*where, *[where.start] * (1 + count - len(where))]
            table.append([order[request], *[0] * (count - len(known)), *known, *sampled])
        number, known, where = upload(torch.tensor(table), self._mesh.device).split((1, count, 1 + count), dim=1)
        n = len(chunks)
        buffers.accepted[:n] = accepted[number[:, 0]]
        # In place of a token there may be the negative code of an error: that request ends.
        torch.cat((known, samples.tokens[where].clamp(min=0)), dim=1, out=buffers.tokens[:n])
        none = buffers.before.new_zeros(buffers.before.shape[1:])  # of a prompt that was never computed
        found = [chunk.request.last_states for chunk in chunks]
        torch.stack([none if states is None else states for states in found], out=buffers.before[:n])

    def _passes(self, buffers: _Buffers, batch: ForwardBatch, hidden: torch.Tensor, count: int) -> torch.Tensor:
        model, requests, accepted = self._model, len(buffers.accepted), buffers.accepted
        own = (batch.sparse_mqa if model.config.has_indexer else batch.dense_mqa).visible.view(requests, -1).long()
        first, length = own[:, :1] - 1, (own > 0).sum(dim=1, keepdim=True)
        columns = torch.arange(2 * count, device=hidden.device)
        # Of count - 1 positions before the first row, those before position 0 are left out.
        left_out = (count - 1 - first).clamp(min=0)
        positions = first - (count - 1) + left_out + columns
        one = self._batch(buffers, batch, positions.where((first >= 0) & (positions < first + length), -1).flatten())
        states = torch.cat((buffers.before, hidden.view(requests, -1, hidden.shape[1])), dim=1)
        places = left_out + columns
        state = _rows_of(states, places.clamp(max=2 * count - 1)).flatten(0, 1)
        last = (count - 1 - left_out + accepted[:, None]).clamp(min=0)
        room = buffers.tokens.new_zeros(requests, count)
        tokens = torch.cat((buffers.tokens, room), dim=1)
        drafts: list[torch.Tensor] = []
        for number in range(1, count + 1):
            ids = tokens.gather(1, (places + number).clamp(max=tokens.shape[1] - 1)).flatten()
            input_ids = self._mesh.tp.all_gather(ids).view(-1, len(ids))
            state = model.draft(number - 1, state, replace(one, input_ids=input_ids), self._cache)
            behind = _rows_of(state.view(requests, 2 * count, -1), last)[:, 0]
            drafts.append(model.own_logits(behind, requests, number - 1).argmax(dim=-1))
            tokens.scatter_(1, accepted[:, None] + count + number, drafts[-1][:, None])
        buffers.kept.copy_(_rows_of(states, accepted[:, None] + 1 + columns[: count - 1]))
        return self._mesh.world.all_gather(torch.stack(drafts, dim=1))

    def _batch(self, buffers: _Buffers, batch: ForwardBatch, positions: torch.Tensor) -> ForwardBatch:
        """The batch of all passes but for its ``input_ids``; ``positions [rows]``, -1 of padding."""
        count, selects = len(positions), self._model.config.has_indexer
        none = batch.dense_mqa if selects else batch.sparse_mqa
        cos, sin = self._model.config.rope.cos_sin(positions.clamp(min=0), self._frequencies)
        buffers.rows.visible.copy_(positions + 1)
        return ForwardBatch(
            rows=count,
            input_ids=batch.input_ids,
            cos=cos,
            sin=sin,
            mha=None,
            dense_mqa=none if selects else buffers.rows,
            sparse_mqa=buffers.rows if selects else none,
            block_tables=batch.block_tables,
            slot_mapping=slots_of(positions, batch.block_tables, buffers.numbers, self._cache.page_size),
            gathers=False,
            cp_rows=count,
            tp_rows=count,
            ep_rows=count,
            decodes=True,
            live=positions >= 0,
        )

    def _make_buffers(self, bucket: Bucket, hidden: torch.Tensor) -> _Buffers:
        requests, count, device = bucket.requests, bucket.rows_per_request - 1, hidden.device
        each = 2 * count
        before = hidden.new_zeros(requests, count - 1, hidden.shape[1])
        return _Buffers(
            accepted=torch.zeros(requests, dtype=torch.int64, device=device),
            tokens=torch.zeros(requests, 1 + each, dtype=torch.int64, device=device),
            before=before,
            kept=torch.empty_like(before),
            rows=Segments.of([Segment(i * each, each, i, bucket.context - each) for i in range(requests)], device),
            numbers=torch.arange(requests, device=device).repeat_interleave(each),
        )


def _rows_of(states: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """``states [requests, n, hidden]`` at ``places [requests, m]``: ``[requests, m, hidden]``."""
    return states.gather(1, places[..., None].expand(-1, -1, states.shape[2]))


def _verifies(chunk: Chunk) -> bool:
    """Whether its request decodes, and every row of it is sampled."""
    return chunk.start >= chunk.request.num_prefill_tokens and chunk.num_logits == chunk.length
