"""From the chunks of a step to the tensors of one rank.

Every rank derives the same :class:`StepPlan` from the same chunks, so that all know how many tokens and samples each
has, and nothing has to be asked. Then each builds its own :class:`ForwardBatch`.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from functools import cached_property

import torch
import torch.nn.functional as F

from dsa_engine.engine.request import Chunk, Request
from dsa_engine.kernels.paged import slots_of
from dsa_engine.kernels.segment import Segment, Segments
from dsa_engine.kernels.transfer import upload
from dsa_engine.model.config import ModelConfig
from dsa_engine.parallel import Mesh
from dsa_engine.parallel.context import split_sequence
from dsa_engine.parallel.group import Group


def unabsorbed_min_queries(config: ModelConfig) -> float:
    """From how many queries on dense attention is cheaper with keys and values expanded.

    Counted per head in multiply-adds: expansion costs ``r·(nope+v)`` a key once, and saves
    ``(2r + rope) − (nope + rope + v)`` a query-key pair (r: the latent's rank).
    """
    rank, rope = config.kv_lora_rank, config.qk_rope_head_dim
    expanded = config.qk_nope_head_dim + rope + config.v_head_dim
    saved = 2 * rank + rope - expanded
    return rank * (expanded - rope) / saved if saved > 0 else float("inf")


@dataclass
class RankPlan:
    """What one rank computes in a step; its rows are those of the three lists of segments, one after the other."""

    chunks: list[Chunk] = field(default_factory=list)  # a segment's ``sequence`` counts in these
    unabsorbed: list[Segment] = field(default_factory=list)  # dense attention, keys and values expanded
    absorbed: list[Segment] = field(default_factory=list)  # dense attention over the latent cache
    sparse: list[Segment] = field(default_factory=list)  # the queries that see more than index_topk tokens
    # (row, request) whose logits are wanted; a request's rows one after the other, in order of position
    logits_rows: list[tuple[int, Request]] = field(default_factory=list)
    rows: int = 0

    @property
    def segments(self) -> list[Segment]:
        return self.unabsorbed + self.absorbed + self.sparse

    def token_ids(self) -> list[int]:
        """Of every row; as :meth:`Request.tokens`, for :func:`known_ids`."""
        ids: list[int] = []
        for s in self.segments:
            ids += self.chunks[s.sequence].request.tokens(s.start, s.length)
        return ids

    def positions(self) -> torch.Tensor:
        """int64 ``[rows]``."""
        runs = [torch.arange(s.start, s.end) for s in self.segments]
        return torch.cat(runs) if runs else torch.empty(0, dtype=torch.int64)

    def sequences(self) -> torch.Tensor:
        """int64 ``[rows]``: which of the chunks each row belongs to."""
        lengths = torch.tensor([s.length for s in self.segments], dtype=torch.int64)
        return torch.tensor([s.sequence for s in self.segments], dtype=torch.int64).repeat_interleave(lengths)


@dataclass
class StepPlan:
    """All ranks' shares of a step."""

    ranks: list[RankPlan]

    @classmethod
    def of(cls, chunks: Seq[Chunk], world_size: int, config: ModelConfig, layout: str) -> StepPlan:
        plans = [RankPlan() for _ in range(world_size)]
        fewest = unabsorbed_min_queries(config)
        parts: list[list[tuple[list[Segment], int, int, int]]] = [[] for _ in plans]
        for chunk in chunks:
            count = len(chunk.ranks)
            for i, runs in enumerate(split_sequence(chunk.start, chunk.length, count, layout)):
                # Turned by the request, or the odd tokens of many short prompts would all fall to the first ranks.
                rank = chunk.ranks[(i + chunk.request.id) % count]
                plan = plans[rank]
                plan.chunks.append(chunk)
                for start, length in runs:
                    # A query that sees at most index_topk tokens attends to all of them: no scores, no selection.
                    dense = min(length, max(0, config.index_topk - start)) if config.has_indexer else length
                    path = plan.unabsorbed if dense >= fewest else plan.absorbed
                    for where, first, n in ((path, start, dense), (plan.sparse, start + dense, length - dense)):
                        if n:
                            parts[rank].append((where, len(plan.chunks) - 1, first, n))
        for plan, mine in zip(plans, parts, strict=True):
            for path in (plan.unabsorbed, plan.absorbed, plan.sparse):
                for where, sequence, first, n in mine:
                    if where is path:
                        path.append(Segment(plan.rows, n, sequence, first))
                        plan.rows += n
            for s in sorted(plan.segments, key=lambda s: (s.sequence, s.start)):
                chunk = plan.chunks[s.sequence]
                wanted = range(max(s.start, chunk.end - chunk.num_logits), s.end)
                plan.logits_rows += [(s.row + position - s.start, chunk.request) for position in wanted]
        return cls(plans)

    @cached_property
    def decodes(self) -> bool:
        """Whether every rank computes one token (of a prompt, perhaps) of each of its sequences, and some has one."""
        chunks = [chunk for plan in self.ranks for chunk in plan.chunks]
        return bool(chunks) and all(chunk.length == 1 and len(chunk.ranks) == 1 for chunk in chunks)

    def attention_pairs(self) -> list[int]:
        """Query-key pairs under the causal mask, of every rank: the work that context parallelism has to balance."""
        return [sum(s.visible_pairs for s in plan.segments) for plan in self.ranks]


@dataclass
class ForwardBatch:
    """One rank's tensors for one forward pass over T tokens; with T = 0 the rank only takes part in collectives."""

    plan: RankPlan
    input_ids: torch.Tensor  # [tp_size, tp_rows] int64: of every rank of the tensor-parallel group, padded with 0
    cos: torch.Tensor  # [T, rope / 2] float32
    sin: torch.Tensor
    absorbed: Segments  # plan.absorbed and plan.sparse, with rows counted from each one's first
    sparse: Segments
    block_tables: torch.Tensor  # [sequences, max_pages] int32
    slot_mapping: torch.Tensor  # [R] int32: where each (gathered) cache row goes; R is T, or cp_size · cp_rows
    gathers: bool  # whether cache rows are gathered over the context-parallel group
    cp_rows: int  # largest token count in the context-parallel group
    tp_rows: int  # … in the tensor-parallel group
    ep_rows: int  # … in the world
    decodes: bool  # whether this is a decode step of all ranks
    live: torch.Tensor | None = None  # [T] bool: rows that are tokens; None where all are

    @classmethod
    def build(
        cls, step: StepPlan, config: ModelConfig, mesh: Mesh, page_size: int, sampled: torch.Tensor | None
    ) -> ForwardBatch:
        """``sampled``: the tokens of the step before, where they have not been read; see :func:`known_ids`."""
        plan, device = step.ranks[mesh.rank], mesh.device
        positions, sequences = plan.positions(), plan.sequences()
        tables = block_tables([chunk.request.pages for chunk in plan.chunks])
        rows = [p.rows for p in step.ranks]
        # At least one row, so that no collective of a group without tokens is empty.
        tp_rows, cp_rows = (max(1, *(rows[r] for r in group.ranks)) for group in (mesh.tp, mesh.cp))
        ids = [F.pad(torch.tensor(p.token_ids(), dtype=torch.int64), (0, tp_rows - p.rows)) for p in _of(step, mesh.tp)]
        # The chunks of a step that splits a request are the same, in the same order, on all ranks of a group.
        gathers = any(len(chunk.ranks) > 1 for chunk in plan.chunks)
        if gathers:
            slots = torch.cat(
                [
                    F.pad(slots_of(p.positions(), tables, p.sequences(), page_size), (0, cp_rows - p.rows), value=-1)
                    for p in _of(step, mesh.cp)
                ]
            )
        else:
            slots = slots_of(positions, tables, sequences, page_size)
        cos, sin = config.rope.cos_sin(positions)
        return cls(
            plan=plan,
            input_ids=known_ids(torch.stack(ids), sampled, device),
            cos=upload(cos, device),
            sin=upload(sin, device),
            absorbed=_from_row_0(plan.absorbed, device),
            sparse=_from_row_0(plan.sparse, device),
            block_tables=upload(tables, device),
            slot_mapping=upload(slots, device),
            gathers=gathers,
            cp_rows=cp_rows,
            tp_rows=tp_rows,
            ep_rows=max(rows),
            decodes=step.decodes,
        )


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


def _from_row_0(segments: list[Segment], device: torch.device) -> Segments:
    first = segments[0].row if segments else 0
    return Segments.of([s._replace(row=s.row - first) for s in segments], device)


def _of(step: StepPlan, group: Group) -> list[RankPlan]:
    return [step.ranks[r] for r in group.ranks]


def block_tables(pages: list[list[int]]) -> torch.Tensor:
    """int32 ``[sequences, max_pages]``; what lies behind a request's last page is never read."""
    width = max((len(p) for p in pages), default=0)
    return torch.tensor([p + [0] * (width - len(p)) for p in pages], dtype=torch.int32).view(len(pages), width)
