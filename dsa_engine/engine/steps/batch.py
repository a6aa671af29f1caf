"""From the plan of a step to the tensors of one rank.

The same builder writes those of a padded step into the buffers of its bucket.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from dsa_engine.config.model import ModelConfig
from dsa_engine.engine.requests.pages import pages_for
from dsa_engine.engine.steps.plan import Bucket, RankPlan, StepPlan, plans_of
from dsa_engine.kernels.rows.segment import Segment, Segments
from dsa_engine.kernels.runtime.transfer import upload
from dsa_engine.model.block_tables import BlockTables
from dsa_engine.model.forward_batch import ForwardBatch, MHASegments
from dsa_engine.parallel import Mesh


def build_batch(
    step: StepPlan,
    config: ModelConfig,
    mesh: Mesh,
    tables: BlockTables,
    sampled: torch.Tensor | None,
    buffers: ForwardBatch | None = None,
    input_ids: torch.Tensor | None = None,
) -> ForwardBatch:
    """This rank's tensors for a step.

    Args:
        tables: of all requests, kept from step to step; those of this step's requests are brought up to date.
        sampled: the tokens of the step before, where they have not been read; see :func:`known_ids`.
        input_ids: ``[tp_size, tp_rows]`` int64 on the device, in place of the requests' tokens.
        buffers: an earlier batch of the same bucket, whose tensors are to be overwritten and used again.
    """
    plan, bucket, device = step.ranks[mesh.rank], step.bucket, mesh.device
    rows = [p.rows for p in step.ranks]
    # At least one row, so that no collective of a group without tokens is empty.
    tp_rows, cp_rows, ep_rows = (max(1, *(rows[r] for r in group.ranks)) for group in (mesh.tp, mesh.cp, mesh.ep))
    pages = [chunk.request.pages for chunk in plan.chunks]
    table_rows, width = tables.rows(pages), max(map(len, pages), default=0)
    if bucket is not None:
        table_rows += [0] * (bucket.requests - len(pages))  # of padding: it is not read
        width = pages_for(bucket.context, tables.page_size)
    # The chunks of a step that splits a request are the same, in the same order, on all ranks of a group.
    gathers = any(len(chunk.ranks) > 1 for chunk in plan.chunks)
    if gathers:
        plans = plans_of(step, mesh.cp)
        slots = torch.cat([F.pad(p.slots(tables, table_rows), (0, cp_rows - p.rows), value=-1) for p in plans])
    else:
        slots = plan.slots(tables, table_rows)
    cos, sin = config.rope.cos_sin(plan.positions.clamp(min=0))

    def put(values: torch.Tensor, name: str) -> torch.Tensor:
        return upload(values, device, out=None if buffers is None else getattr(buffers, name))

    if input_ids is None:
        ids = torch.tensor([p.token_ids(tp_rows) for p in plans_of(step, mesh.tp)], dtype=torch.int64)
        input_ids = known_ids(ids, sampled, device)
    in_tables = [s._replace(sequence=table_rows[s.sequence]) for s in plan.mha]
    dense_mqa, sparse_mqa = _mqa_segments(plan, bucket, config.has_indexer, device, buffers)
    return ForwardBatch(
        rows=plan.rows,
        input_ids=input_ids if buffers is None else buffers.input_ids.copy_(input_ids),
        cos=put(cos, "cos"),
        sin=put(sin, "sin"),
        mha=MHASegments.of(in_tables, tables.host, tables.page_size, device),
        dense_mqa=dense_mqa,
        sparse_mqa=sparse_mqa,
        block_tables=tables.gather(table_rows, width, out=None if buffers is None else buffers.block_tables),
        slot_mapping=put(slots, "slot_mapping"),
        gathers=gathers,
        cp_rows=cp_rows,
        tp_rows=tp_rows,
        ep_rows=ep_rows,
        decodes=step.decodes,
        live=None if bucket is None else put(plan.positions >= 0, "live"),
    )


def _mqa_segments(
    plan: RankPlan, bucket: Bucket | None, selects: bool, device: torch.device, buffers: ForwardBatch | None
) -> tuple[Segments, Segments]:
    """Those of the two absorbed forms, dense and sparse.

    A bucket's stay the same on the host, where the rows of each request see all of the context; on the device they see
    what they do see.
    """
    if bucket is None:
        return _from_row_0(plan.dense_mqa, device), _from_row_0(plan.sparse_mqa, device)
    if buffers is None:
        count = bucket.rows_per_request
        each = [Segment(i * count, count, i, bucket.context - count) for i in range(bucket.requests)]
        all_rows, none = Segments.of(each, device), Segments.of([], device)
        dense, sparse = (none, all_rows) if selects else (all_rows, none)
    else:
        dense, sparse = buffers.dense_mqa, buffers.sparse_mqa
    upload((plan.positions + 1).int(), device, out=(sparse if selects else dense).visible)
    return dense, sparse


def _from_row_0(segments: list[Segment], device: torch.device) -> Segments:
    first = segments[0].row if segments else 0
    return Segments.of([s._replace(row=s.row - first) for s in segments], device)


def known_ids(ids: torch.Tensor, sampled: torch.Tensor | None, device: torch.device) -> torch.Tensor:
    """int64 token ids on the device.

    Args:
        ids: on the host; ``-1 - index`` stands for the token at that index of ``sampled`` (``Request.tokens``).
        sampled: ``[n]`` on the device; in place of a token it may have the negative code of an error, and what is
            computed for that request is dropped.
    """
    known = upload(ids, device)
    if sampled is None or not bool((ids < 0).any()):
        return known
    return known.where(known >= 0, sampled.clamp(min=0)[(-1 - known).clamp(min=0)])
