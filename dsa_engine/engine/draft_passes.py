"""The draft passes of a padded step: static shapes, so that they may be part of a CUDA graph.

Where a request's drafts begin depends on how many were accepted, which the device alone knows when the passes are
launched: so the positions, slots and angles of their rows are computed there. Every request of the bucket has one row
in each pass. A row that has no page, or belongs to no request, is padding.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from dsa_engine.engine.step_plan import Bucket
from dsa_engine.kernels.paged import slots_of
from dsa_engine.kernels.segment import Segment, Segments
from dsa_engine.model.forward_batch import ForwardBatch
from dsa_engine.model.kv_cache import KVCache
from dsa_engine.model.model import Model
from dsa_engine.parallel import Mesh


@dataclass(frozen=True)
class BucketRows:
    """As many rows of every request of a bucket; a batch of them is made of what the device knows.

    Attributes:
        each: rows of a request.
        rows: on the host they see the whole context; on the device, what they do see, written anew in every pass.
        sequences: int64 ``[requests · each]``, the row of the block tables.
    """

    each: int
    rows: Segments
    none: Segments
    sequences: torch.Tensor
    frequencies: torch.Tensor

    @classmethod
    def of(cls, bucket: Bucket, each: int, model: Model) -> BucketRows:
        device = model.runtime.mesh.device
        segments = [Segment(i * each, each, i, bucket.context - each) for i in range(bucket.requests)]
        return cls(
            each,
            Segments.of(segments, device),
            Segments.of([], device),
            torch.arange(bucket.requests, device=device).repeat_interleave(each),
            model.config.rope.inverse_frequencies().to(device),
        )

    def batch(
        self, model: Model, page_size: int, tables: torch.Tensor, positions: torch.Tensor, input_ids: torch.Tensor
    ) -> ForwardBatch:
        """The batch of these rows, by launches that are always the same.

        Args:
            tables: the block tables ``[requests, pages]`` of the bucket.
            positions: int64 ``[rows]``, -1 of padding.
            input_ids: int64 ``[rows]``.
        """
        count, selects = len(positions), model.config.has_indexer
        cos, sin = model.config.rope.cos_sin(positions.clamp(min=0), self.frequencies)
        self.rows.visible.copy_(positions + 1)
        return ForwardBatch(
            rows=count,
            input_ids=model.runtime.mesh.tp.all_gather(input_ids).view(-1, count),
            cos=cos,
            sin=sin,
            mha=None,
            dense_mqa=self.none if selects else self.rows,
            sparse_mqa=self.rows if selects else self.none,
            block_tables=tables,
            slot_mapping=slots_of(positions, tables, self.sequences, page_size),
            gathers=False,
            cp_rows=count,
            tp_rows=count,
            ep_rows=count,
            decodes=True,
            live=positions >= 0,
        )


class DraftPasses:
    """Runs the MTP module behind a padded step.

    Args:
        model, cache, mesh: of the engine.
    """

    def __init__(self, model: Model, cache: KVCache, mesh: Mesh):
        self._model = model
        self._cache = cache
        self._mesh = mesh

    def __call__(
        self,
        batch: ForwardBatch,
        hidden: torch.Tensor,
        input_ids: torch.Tensor,
        rows: BucketRows,
        last: torch.Tensor,
        positions: torch.Tensor,
        limits: torch.Tensor,
        count: int,
    ) -> torch.Tensor:
        """Drafts of this rank's requests, int64 ``[requests, count]``.

        Args:
            batch, hidden: of the step, with the model's hidden states ``[T, hidden]``.
            input_ids: ``[tp_size, tp_rows]``, the tokens behind the step's rows.
            rows: one of every request.
            last: int64 ``[requests]``, the row of each behind which tokens are drafted.
            positions: int64 ``[requests]``, of these rows.
            limits: int64 ``[requests]``: tokens for which each has pages; 0 of padding.
        """
        model, cache = self._model, self._cache
        state = model.draft(0, hidden, replace(batch, input_ids=input_ids), cache)[last]
        drafts: list[torch.Tensor] = []
        for number in range(count):
            if number:
                at = positions + number
                one = rows.batch(model, cache.page_size, batch.block_tables, at.where(at < limits, -1), drafts[-1])
                state = model.draft(0, state, one, cache)
            drafts.append(model.own_logits(state, state.shape[0], 0).argmax(dim=-1))
        return torch.stack(drafts, dim=1)
