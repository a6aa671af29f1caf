"""Builds one rank's tensors from the plan of a step that is not padded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from dsa_engine.config.model import ModelConfig
from dsa_engine.engine.requests.limits import pages_for
from dsa_engine.engine.requests.request import Chunk
from dsa_engine.engine.steps.plan import RankPlan, StepPlan
from dsa_engine.kernels.rows.segment import Segment, Segments
from dsa_engine.kernels.runtime.kernel import WATCHES
from dsa_engine.kernels.runtime.pieces import Pieces
from dsa_engine.kernels.runtime.transfer import upload, upload_together
from dsa_engine.model.context_shards import LayerBuffers
from dsa_engine.model.forward_batch import BlockTables, ForwardBatch, MHASegments, MicroBatchPair
from dsa_engine.model.kv_cache import KVCache
from dsa_engine.parallel import Mesh
from dsa_engine.parallel.group import Group


def build_batch(
    step: StepPlan, config: ModelConfig, mesh: Mesh, cache: KVCache, sampled: torch.Tensor | None,
    repeats: bool = True,
) -> ForwardBatch | MicroBatchPair:  # fmt: skip
    """This rank's tensors for a step, or those of its micro-batches. The block tables of its requests are updated; for
    ``sampled`` see :func:`known_ids`. ``repeats``: on CUDA, layers repeat the launches of those before."""
    on_cuda, buffers = mesh.device.type == "cuda", None
    if step.own.chunks and (cache.group is not None or (cache.spilled and _has_spilled(step.own.chunks, cache))):
        assert step.decode is None, "decode steps of ranks with spilled or distributed pages are padded"
        parts = [(chunk.request.pages, chunk.start, chunk.end) for chunk in step.own.chunks if chunk.length]
        buffers = LayerBuffers(cache, parts, config.num_hidden_layers)
    repeats = repeats and on_cuda and WATCHES and buffers is None
    given = config, mesh, cache, sampled, repeats, buffers
    if step.micro_batches is None:
        return _whole(step, *given)
    both, unsent = step.micro_batches, list[Callable[[], None]]() if on_cuda else None
    batches = [partial(_whole, one, *given, one is both[0], unsent) for one in both]
    return MicroBatchPair((batches[0], batches[1]), lambda: upload(_row_order(step, both), mesh.device))


def _whole(
    step: StepPlan,
    config: ModelConfig,
    mesh: Mesh,
    cache: KVCache,
    sampled: torch.Tensor | None,
    repeats: bool,
    buffers: LayerBuffers | None,
    first_micro_batch: bool = False,
    unsent: list[Callable[[], None]] | None = None,
) -> ForwardBatch:
    plan, device, rows, tables = step.own, mesh.device, step.rows, cache.block_tables
    gathers = any(len(chunk.ranks) > 1 for chunk in plan.chunks)
    # A rank alone with buffers stores its rows as a group of one does.
    group = mesh.cp if gathers or buffers is None else mesh.dcp
    # At least one row: no collective of a group without tokens is empty.
    tp_rows, cp_rows, ep_rows = [max(1, *rows[[*one.ranks]].tolist()) for one in (mesh.tp, group, mesh.ep)]
    of_pools: list[torch.Tensor] = []
    if buffers is None or not plan.chunks:
        pages = [chunk.request.pages for chunk in plan.chunks]
        table_rows, width, host = tables.rows(pages), max(map(len, pages), default=0), tables.host
        slots = gathered_slots(step, group, tables, table_rows) if gathers else own_slots(plan, tables, table_rows)
        on_device = tables.gather(table_rows, width) if step.decodes else host[table_rows, :width]
    else:
        host, slots, *of_pools = _buffer_tables(step, group, cache.page_size, buffers)
        table_rows, on_device = [*range(len(host))], host
    ids = plan.token_ids(tp_rows)
    mha = MHASegments.of([s._replace(sequence=table_rows[s.sequence]) for s in plan.mha], host, cache.page_size)
    forms = [_from_row_0(plan.dense_mqa), _from_row_0(plan.sparse_mqa)]
    # What the host has made goes in one copy.
    made = [*config.rope.cos_sin(plan.positions), slots, *(x for one in forms for x in (one.sequences, one.visible))]
    made += () if mha is None else (mha.cu_seqlens_q.on_device, mha.cu_seqlens_k.on_device, mha.key_slots)
    made += of_pools
    tables_there = step.decodes and not of_pools
    made += (() if tables_there else (on_device,)) + (() if sampled is not None else (ids,))
    cos, sin, slots, *columns = upload_together(made, device)
    ids = columns.pop() if sampled is None else known_ids(ids, sampled, device)
    on_device = on_device if tables_there else columns.pop()
    pool_slots = columns.pop() if of_pools else None
    dense, sparse = (replace(one, sequences=columns[2 * i], visible=columns[2 * i + 1]) for i, one in enumerate(forms))
    batch = ForwardBatch(
        rows=plan.rows,
        input_ids=mesh.tp.all_gather(ids).view(-1, tp_rows),
        cos=cos,
        sin=sin,
        mha=None if mha is None else mha.on(*columns[4:]),
        dense_mqa=dense,
        sparse_mqa=sparse,
        block_tables=on_device,
        slot_mapping=slots,
        gathers=group if gathers or of_pools else None,
        cp_rows=cp_rows,
        tp_rows=tp_rows,
        ep_rows=ep_rows,
        decodes=step.decodes,
        token_mask=None,
        first_micro_batch=first_micro_batch,
        unsent=unsent,
        buffers=buffers,
        pool_slots=pool_slots,
    )
    batch.pieces = Pieces() if repeats else None
    return batch


def _has_spilled(chunks: Sequence[Chunk], cache: KVCache) -> bool:
    """Whether any page with rows of these chunks, or that they see, is spilled."""
    counts = (pages_for(chunk.end, cache.page_size) if chunk.length else 0 for chunk in chunks)
    pages = (chunk.request.pages[:count] for chunk, count in zip(chunks, counts, strict=True))
    return any(max(of_chunk, default=0) >= cache.pages for of_chunk in pages)


class _Numbers(NamedTuple):
    """Rows of page numbers, as block tables have them."""

    host: torch.Tensor
    page_size: int


def _buffer_tables(
    step: StepPlan, group: Group, page_size: int, buffers: LayerBuffers
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of this rank's chunks: int32 ``[chunks, pages]``, their pages in ``buffers``; and as :func:`gathered_slots` the
    slots of cache rows there and in this rank's pools."""
    chunks = step.own.chunks
    counts = [pages_for(chunk.end, page_size) if chunk.length else 0 for chunk in chunks]
    numbers = np.zeros((len(chunks), max(counts)), np.int32)
    in_buffers = np.zeros_like(numbers)
    for number, (chunk, count) in enumerate(zip(chunks, counts, strict=True)):
        numbers[number, :count] = chunk.request.pages[:count]
        in_buffers[number, :count] = buffers.pages_of(numbers[number, :count])
    slots = gathered_slots(step, group, _Numbers(torch.from_numpy(numbers), page_size), [*range(len(chunks))])
    there, here = buffers.slots(slots.numpy())
    return torch.from_numpy(in_buffers), torch.from_numpy(there), torch.from_numpy(here)


def own_slots(plan: RankPlan, tables: BlockTables, table_rows: Sequence[int]) -> torch.Tensor:
    """int32 ``[rows]``: slots of this rank's cache rows; ``table_rows`` are the rows of its chunks in ``tables``."""
    row = np.repeat([table_rows[s.sequence] for s in plan.segments], [s.length for s in plan.segments])
    positions, size = plan.positions.numpy(), tables.page_size
    pages = tables.host.numpy()[row.astype(np.int64), positions // size]
    return torch.from_numpy(pages * size + (positions % size).astype(np.int32))


def gathered_slots(
    step: StepPlan, group: Group, tables: BlockTables | _Numbers, table_rows: Sequence[int]
) -> torch.Tensor:
    """int32 ``[ranks · rows of the longest]``: slots of the cache rows of a context-parallel group, −1 for padding.

    All ranks of the group have the same chunks. The slots of a chunk are listed once, in order of position, and copied
    from there to the rows of each segment.
    """
    table, size = step.segments, tables.page_size
    assert table is not None, "a step made of chunks"
    rows = np.array([step.rows[rank] for rank in group.ranks])
    longest = max(1, int(rows.max()))
    slots = np.full(len(rows) * longest, -1, dtype=np.int32)
    own = slice(*np.searchsorted(table.rank, (group.ranks[0], group.ranks[-1] + 1)))
    chunk_of, start, length = table.chunk[own], table.start[own], table.length[own]
    padding_before = np.arange(len(rows)) * longest - (np.cumsum(rows) - rows)
    row = np.cumsum(length) - length + padding_before[table.rank[own] - group.ranks[0]]
    numbers = [number for number, chunk in enumerate(step.chunks) if step.rank in chunk.ranks]
    for number, table_row in zip(numbers, table_rows, strict=True):
        first, last = step.chunks[number].start // size, pages_for(step.chunks[number].end, size)
        pages = tables.host[table_row, first:last].numpy()
        in_order = (pages[:, None] * size + np.arange(size, dtype=np.int32)).ravel()
        mine = chunk_of == number
        columns = (column[mine].tolist() for column in (start - first * size, length, row))
        for at, count, to in zip(*columns, strict=True):
            slots[to : to + count] = in_order[at : at + count]
    return torch.from_numpy(slots)


def _from_row_0(segments: list[Segment]) -> Segments:
    first = segments[0].row if segments else 0
    return Segments.of([s._replace(row=s.row - first) for s in segments])


def known_ids(ids: torch.Tensor, sampled: torch.Tensor | None, device: torch.device) -> torch.Tensor:
    """int64 token ids on the device.

    Args:
        ids: token ids on the host; ``-1 - index`` means the token at that index of ``sampled`` (``Request.tokens``).
        sampled: ``[n]`` on the device, tokens of the step before, if they have not been read. It may hold the negative
            code of an error in place of a token; the results of that request are dropped.
    """
    if sampled is None or not bool((ids < 0).any()):
        return upload(ids, device)
    known, index = upload(torch.stack((ids, (-1 - ids).clamp_(min=0))), device)
    return known.where(known >= 0, sampled[index].clamp_(min=0))


def _row_order(step: StepPlan, micro_batches: Sequence[StepPlan]) -> torch.Tensor:
    """int64 ``[rows of this rank]``: the index of each row among those of the first micro-batch and then of the
    second one."""
    whole = _row_keys(step.own)
    of_both = torch.cat([_row_keys(one.own) for one in micro_batches])
    assert len(whole) == len(of_both), "the micro-batches have the rows of the step"
    order = torch.empty_like(whole)
    order[whole.argsort()] = of_both.argsort()
    return order


def _row_keys(plan: RankPlan) -> torch.Tensor:
    """A different number for each request and position."""
    keys = torch.empty(plan.rows, dtype=torch.int64)
    for s in plan.segments:
        first = plan.chunks[s.sequence].request.id << 32
        keys[s.row : s.row + s.length] = torch.arange(first + s.start, first + s.end)
    return keys
