"""Divides a step over the ranks: which rank computes which rows, and which rows need logits.

Every rank derives the same :class:`StepPlan` from the same chunks. So all know how many rows and logits each rank has,
without communication. A decode step may be padded to a bucket: its plan then contains the rows of the bucket.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain

import torch

from dsa_engine.config.model import ModelConfig
from dsa_engine.engine.requests.request import Chunk, Request
from dsa_engine.engine.steps.context_buckets import ContextBuckets
from dsa_engine.kernels.rows.segment import Segment
from dsa_engine.kernels.rows.slots_of import slots_of
from dsa_engine.kernels.runtime.integers import next_power_of_2
from dsa_engine.model.block_tables import BlockTables
from dsa_engine.parallel.context_parallel import split_sequence
from dsa_engine.parallel.group import Group


def mha_min_queries(config: ModelConfig) -> float:
    """Smallest number of queries for which the MHA form is cheaper than dense MQA.

    Counted per head in multiply-adds: expansion costs ``r·(nope+v)`` once per key, and saves
    ``(2r + rope) − (nope + rope + v)`` per query-key pair (r: the latent's rank).
    """
    rank, rope = config.kv_lora_rank, config.qk_rope_head_dim
    expanded = config.qk_nope_head_dim + rope + config.v_head_dim
    saved = 2 * rank + rope - expanded
    return rank * (expanded - rope) / saved if saved > 0 else float("inf")


@dataclass(frozen=True)
class Bucket:
    """Static shape that a decode step is padded to; every request has the same number of rows."""

    requests: int
    rows_per_request: int
    context: int  # maximum number of tokens that a row sees

    @property
    def rows(self) -> int:
        return self.requests * self.rows_per_request


@dataclass
class RankPlan:
    """The rows that one rank computes in a step, as segments.

    The rows of each form of attention (see :class:`~dsa_engine.model.forward_batch.ForwardBatch`) are consecutive. A
    padded step has one form, and rows in no segment are padding.
    """

    chunks: list[Chunk] = field(default_factory=list)  # a segment's ``sequence`` is an index into these
    mha: list[Segment] = field(default_factory=list)
    dense_mqa: list[Segment] = field(default_factory=list)
    sparse_mqa: list[Segment] = field(default_factory=list)
    # (row, request) of the rows with logits; a request's rows are consecutive, in order of position
    logits_rows: list[tuple[int, Request]] = field(default_factory=list)
    rows: int = 0  # padding included

    @property
    def segments(self) -> list[Segment]:
        return self.mha + self.dense_mqa + self.sparse_mqa

    @property
    def num_tokens(self) -> int:
        """Number of rows without padding."""
        return sum(s.length for s in self.segments)

    def token_ids(self, rows: int) -> list[int]:
        """Token id of each row, as :meth:`Request.tokens` gives it, for ``batch.known_ids``; zeros up to ``rows``."""
        ids = [0] * rows
        for s in self.segments:
            ids[s.row : s.row + s.length] = self.chunks[s.sequence].request.tokens(s.start, s.length)
        return ids

    def next_token_ids(self, rows: int, sampled: Mapping[Request, range], ahead: int = 1) -> list[int]:
        """For each row, the token ``ahead`` positions later, which an MTP module embeds there; 0 if there is none.

        Args:
            sampled: indices, for ``batch.known_ids``, of the tokens after a request's known ones. These are the tokens
                that this step samples; a request's current drafts are not used.
        """
        ids = [0] * rows
        for s in self.segments:
            request, first = self.chunks[s.sequence].request, s.start + ahead
            known = max(0, min(s.length, len(request) - first))
            skipped = max(0, first - len(request))
            new = sampled.get(request, range(0))[skipped : skipped + s.length - known]
            values = request.tokens(first, known) + [-1 - index for index in new]
            ids[s.row : s.row + len(values)] = values
        return ids

    @cached_property
    def _by_row(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Position (−1 for padding) and chunk index of each row; int64 ``[rows]`` each."""
        positions, sequences = [-1] * self.rows, [0] * self.rows
        for s in self.segments:
            rows = slice(s.row, s.row + s.length)
            positions[rows] = range(s.start, s.end)
            sequences[rows] = [s.sequence] * s.length
        return torch.tensor(positions, dtype=torch.int64), torch.tensor(sequences, dtype=torch.int64)

    @property
    def positions(self) -> torch.Tensor:
        """int64 ``[rows]``, −1 for padding."""
        return self._by_row[0]

    @property
    def rows_with_logits(self) -> torch.Tensor:
        """int64 ``[logits_rows]``."""
        return torch.tensor([row for row, _ in self.logits_rows], dtype=torch.int64)

    def slots(self, tables: BlockTables, table_rows: Seq[int]) -> torch.Tensor:
        """int32 ``[rows]``, −1 for padding; ``table_rows`` are the rows of the chunks in ``tables``."""
        positions, chunks = self._by_row
        if not table_rows:
            return torch.full_like(positions, -1, dtype=torch.int32)
        return slots_of(positions, tables.host, torch.tensor(table_rows)[chunks], tables.page_size)

    def _set_rows(self) -> None:
        """Numbers the rows of the segments, form after form, and collects the rows with logits."""
        for form in (self.mha, self.dense_mqa, self.sparse_mqa):
            for i, s in enumerate(form):
                form[i] = s._replace(row=self.rows)
                self.rows += s.length
        for s in sorted(self.segments, key=lambda s: (s.sequence, s.start)):
            chunk = self.chunks[s.sequence]
            unwanted = max(0, chunk.end - chunk.num_logits - s.start)
            self.logits_rows += [(s.row + i, chunk.request) for i in range(unwanted, s.length)]

    def padded(self, bucket: Bucket, selects: bool) -> RankPlan:
        """The same chunks in the rows of a bucket, all in one form of attention."""
        plan = RankPlan(self.chunks, rows=bucket.rows)
        form = plan.sparse_mqa if selects else plan.dense_mqa
        for i, chunk in enumerate(self.chunks):
            row = i * bucket.rows_per_request
            form.append(Segment(row, chunk.length, i, chunk.start))
            wanted = range(chunk.length - chunk.num_logits, chunk.length)
            plan.logits_rows += [(row + j, chunk.request) for j in wanted]
        return plan


@dataclass
class StepPlan:
    """The plans of all ranks for one step."""

    ranks: list[RankPlan]
    max_decode_rows: int = 1  # maximum number of rows of a request in a decode step
    bucket: Bucket | None = None  # set if the step is padded
    micro_batches: tuple[StepPlan, StepPlan] | None = None  # set if the step is cut (``micro_batches.py``)

    @classmethod
    def of(
        cls,
        chunks: Seq[Chunk],
        world_size: int,
        config: ModelConfig,
        max_decode_rows: int = 1,
        cuts: Mapping[Request, int] | None = None,
    ) -> StepPlan:
        """Divides the chunks over the ranks.

        Args:
            cuts: positions at which the chunks of some requests are cut: the tokens before and after are divided each
                for itself.
        """
        cuts = cuts or {}
        plans = [RankPlan() for _ in range(world_size)]
        fewest = mha_min_queries(config)
        for chunk in chunks:
            count = len(chunk.ranks)
            parts = [(chunk.start, chunk.length)]
            if (cut := cuts.get(chunk.request)) is not None:
                parts = [(chunk.start, cut - chunk.start), (cut, chunk.end - cut)]
            of_parts = [split_sequence(*part, count) for part in parts]
            for i, pieces in enumerate(chain(*of_rank) for of_rank in zip(*of_parts, strict=True)):
                # Rotated by request, or the first ranks would get the leftover tokens of all short prompts.
                plan = plans[chunk.ranks[(i + chunk.request.id) % count]]
                plan.chunks.append(chunk)
                for start, length in pieces:
                    # A query that sees at most index_topk tokens attends to all of them: no scores, no selection.
                    dense = min(length, max(0, config.index_topk - start)) if config.has_indexer else length
                    form = plan.mha if dense >= fewest else plan.dense_mqa
                    for into, first, n in ((form, start, dense), (plan.sparse_mqa, start + dense, length - dense)):
                        if n:
                            into.append(Segment(0, n, len(plan.chunks) - 1, first))
        for plan in plans:
            plan._set_rows()
        return cls(plans, max_decode_rows)

    @cached_property
    def decodes(self) -> bool:
        """Whether this is a decode step: every chunk has few tokens, perhaps of a prompt, on one rank."""
        chunks = [chunk for plan in self.ranks for chunk in plan.chunks]
        return bool(chunks) and all(c.length <= self.max_decode_rows and len(c.ranks) == 1 for c in chunks)

    def padded(self, config: ModelConfig, contexts: ContextBuckets, num_drafts: int = 0) -> StepPlan:
        """The decode step in the smallest bucket that it fits in, which is the same on all ranks.

        Args:
            contexts: possible context lengths.
            num_drafts: number of drafts that the step makes. The context has room for them, and every request has rows
                to verify as many.
        """
        chunks = [chunk for plan in self.ranks for chunk in plan.chunks]
        requests = next_power_of_2(max(len(plan.chunks) for plan in self.ranks))
        rows_per_request = max(1 + num_drafts, *(chunk.length for chunk in chunks))
        # A request with fewer rows is padded with rows after its last one.
        longest = max(chunk.start for chunk in chunks) + rows_per_request + num_drafts
        bucket = Bucket(requests, rows_per_request, contexts.of(longest, num_drafts))
        plans = [plan.padded(bucket, config.has_indexer) for plan in self.ranks]
        return StepPlan(plans, self.max_decode_rows, bucket)

    def attention_pairs(self) -> list[int]:
        """Query-key pairs of every rank under the causal mask: the work that context parallelism balances."""
        return [sum(s.visible_pairs for s in plan.segments) for plan in self.ranks]


def plans_of(step: StepPlan, group: Group) -> list[RankPlan]:
    """The plans of the ranks of a group."""
    return [step.ranks[r] for r in group.ranks]
