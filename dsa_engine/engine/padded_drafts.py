"""The draft passes behind a padded step whose tokens the sampler has chosen, kernel by kernel: a graph of their own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from dsa_engine.engine.decode_graphs import DecodeGraphs
from dsa_engine.engine.draft_passes import BucketRows, DraftPasses
from dsa_engine.engine.request import Request
from dsa_engine.engine.step_plan import Bucket, StepPlan
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
    rows: BucketRows  # one of every request


class PaddedDrafts:
    """Runs the draft passes of padded steps.

    Args:
        model, cache, mesh: of the engine.
        passes: of the MTP module.
    """

    def __init__(self, model: Model, cache: KVCache, mesh: Mesh, passes: DraftPasses):
        self._model = model
        self._cache = cache
        self._mesh = mesh
        self._passes = passes
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
            none = torch.zeros(bucket.requests, dtype=torch.int64, device=device)
            ones = BucketRows.of(bucket, 1, self._model)
            buffers = _Buffers(torch.empty_like(input_ids), none.clone(), none.clone(), none.clone(), ones)
            self._buffers[bucket] = buffers
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
        return graphs.run(("drafts", bucket), lambda: self._run(buffers, batch, hidden, bucket.rows_per_request - 1))

    def _run(self, buffers: _Buffers, batch: ForwardBatch, hidden: torch.Tensor, count: int) -> torch.Tensor:
        ids, at = buffers.input_ids, (buffers.last, buffers.positions, buffers.limits)
        return self._mesh.world.all_gather(self._passes(batch, hidden, ids, buffers.rows, *at, count))
