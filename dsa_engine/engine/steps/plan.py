"""Divides a step over the ranks: which rank computes which rows, and which rows need logits.

Every rank divides the same chunks in the same way. A rank's :class:`StepPlan` has its own segments, and of the other
ranks how many rows and logits they have, which fixes the shape of every collective. A decode step may be padded to a
bucket: its plan then contains the rows of the bucket.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch

from dsa_engine.config.model import ModelConfig
from dsa_engine.engine.requests.request import Chunk, Request
from dsa_engine.engine.requests.samples import DecodeStep, Samples
from dsa_engine.engine.steps.context_buckets import Bucket, ContextBuckets, bucket_of
from dsa_engine.kernels.rows.segment import Segment
from dsa_engine.parallel.context_parallel import pieces_of
from dsa_engine.sampling_params import RECORDS


def mha_min_queries(config: ModelConfig) -> float:
    """Smallest number of queries for which the MHA form is cheaper than dense MQA.

    Counted per head in multiply-adds: expansion costs ``r·(nope+v)`` once per key, and saves
    ``(2r + rope) − (nope + rope + v)`` per query-key pair (r: the latent's rank). With ``batch_invariant`` none is, as
    the number of queries in a segment follows from the batch.
    """
    if config.batch_invariant:
        return float("inf")
    rank, rope = config.kv_lora_rank, config.qk_rope_head_dim
    expanded = config.qk_nope_head_dim + rope + config.v_head_dim
    saved = 2 * rank + rope - expanded
    return rank * (expanded - rope) / saved if saved > 0 else float("inf")


def dense_tokens(config: ModelConfig) -> float:
    """A query that sees at most so many tokens attends to all of them: no scores, no selection. With
    ``batch_invariant`` each query of a model with an indexer selects, as in a padded step."""
    if not config.has_indexer:
        return float("inf")
    return 0 if config.batch_invariant else config.index_topk


class Wanted(NamedTuple):
    """A token to choose, for ``position`` of the request; it depends on all tokens before."""

    request: Request
    position: int
    row: int  # the row of the token before, whose logits are wanted


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
    rows: int = 0  # padding included

    @classmethod
    def of_decode(cls, chunks: list[Chunk], config: ModelConfig) -> RankPlan:
        """The plan of a rank that computes these chunks alone."""
        plan, few, limit = cls(chunks), mha_min_queries(config), dense_tokens(config)
        pieces: tuple[list[tuple[int, int, int]], ...] = ([], [], [])
        for number, chunk in enumerate(chunks):
            dense = int(max(0, min(chunk.length, limit - chunk.start)))
            pieces[dense < few].append((dense, number, chunk.start))
            pieces[2].append((chunk.length - dense, number, chunk.start + dense))
        for segments, of_form in zip((plan.mha, plan.dense_mqa, plan.sparse_mqa), pieces, strict=True):
            for piece in of_form:
                if piece[0]:
                    segments.append(Segment(plan.rows, *piece))
                    plan.rows += piece[0]
        return plan

    @property
    def segments(self) -> list[Segment]:
        return self.mha + self.dense_mqa + self.sparse_mqa

    def token_ids(self, rows: int, ahead: int = 0, sampled: Mapping[Request, range] | None = None) -> torch.Tensor:
        """Token id of each row, for ``batch.known_ids``; int64, zeros up to ``rows``.

        Args:
            ahead: for each row, the token this number of positions later, which an MTP module embeds there; 0 if there
                is none.
            sampled: indices, for ``batch.known_ids``, of the tokens that this step samples, which take the place of a
                request's current drafts; None: the drafts follow its tokens, see :meth:`Request.tokens`.
        """
        ids = np.zeros(rows, dtype=np.int64)
        for s in self.segments:
            request, first = self.chunks[s.sequence].request, s.start + ahead
            if sampled is None:
                tokens = request.tokens(first, s.length)
            else:
                tokens = request.tokens(first, max(0, min(s.length, len(request) - first)))
                new = sampled.get(request, range(0))[max(0, first - len(request)) :]
                tokens.extend([-1 - index for index in new[: s.length - len(tokens)]])
            ids[s.row : s.row + len(tokens)] = tokens
        return torch.from_numpy(ids)

    @cached_property
    def positions(self) -> torch.Tensor:
        """Position of each row, int64 ``[rows]``, −1 for padding."""
        positions = np.full(self.rows, -1)
        for s in self.segments:
            positions[s.row : s.row + s.length] = np.arange(s.start, s.end)
        return torch.from_numpy(positions)

    @cached_property
    def wanted(self) -> list[Wanted]:
        """The tokens to choose; those of a request follow each other, in order of position."""
        wanted = []
        for s in sorted(self.segments, key=lambda s: (s.sequence, s.start)):
            chunk = self.chunks[s.sequence]
            for position in range(max(s.start, chunk.end - chunk.num_logits), s.end):
                wanted.append(Wanted(chunk.request, position + 1, s.row + position - s.start))
        return wanted

    @property
    def rows_with_logits(self) -> torch.Tensor:
        """int64 ``[tokens to choose]``."""
        return torch.tensor([row for _, _, row in self.wanted], dtype=torch.int64)

    def padded(self, bucket: Bucket, selects: bool) -> RankPlan:
        """The same chunks in the rows of a bucket, all in one form of attention."""
        plan = RankPlan(self.chunks, rows=bucket.rows)
        form = plan.sparse_mqa if selects else plan.dense_mqa
        for i, chunk in enumerate(self.chunks):
            form.append(Segment(i * bucket.rows_per_request, chunk.length, i, chunk.start))
        return plan


class SegmentTable(NamedTuple):
    """The segments of all ranks in a step that is not padded, sorted by rank and row; int64 ``[n]`` each."""

    rank: np.ndarray
    chunk: np.ndarray  # index into the chunks of the step
    form: np.ndarray  # 0: MHA, 1: dense MQA, 2: sparse MQA
    start: np.ndarray
    length: np.ndarray

    @classmethod
    def of(cls, chunks: Seq[Chunk], config: ModelConfig, cuts: Mapping[Request, int]) -> SegmentTable:
        parts = []
        for number, chunk in enumerate(chunks):
            cut = cuts.get(chunk.request, chunk.end)
            for first, last in ((chunk.start, cut), (cut, chunk.end)):
                if first < last:
                    ranks = len(chunk.ranks), chunk.ranks.start
                    parts.append((number, first, last - first, *ranks, chunk.request.id))
        columns = torch.tensor(parts, dtype=torch.int64).view(-1, 6).T
        before = columns[3].cumsum(0) - columns[3]
        of_each_rank = torch.cat((columns, before[None])).repeat_interleave(columns[3], dim=1)
        number, begin, count, ranks, first_rank, request_id, before = of_each_rank
        index = torch.arange(len(number)) - before
        # Rotated by request, or the first ranks would get the leftover tokens of all short prompts.
        pieces = pieces_of(begin, count, (index - request_id) % ranks, ranks)
        start, length = (column.numpy().ravel() for column in pieces)
        rank, chunk = (column.numpy().repeat(2) for column in (first_rank + index, number))
        dense = np.clip(dense_tokens(config) - start, 0, length).astype(np.int64)
        form = (dense < mha_min_queries(config)).astype(np.int64)
        whole = np.stack((rank, chunk, form, start, dense))
        sparse = np.stack((rank, chunk, np.full_like(form, 2), start + dense, length - dense))
        table = np.concatenate((whole, sparse), axis=1)
        table = table[:, table[4] > 0]
        return cls(*table[:, np.argsort(3 * table[0] + table[2], kind="stable")])

    def samples(self, chunks: Seq[Chunk], world_size: int) -> Samples:
        """The rows with logits of each rank and chunk, in this order."""
        first_wanted = np.array([chunk.end - chunk.num_logits for chunk in chunks], dtype=np.int64)[self.chunk]
        wanted = (self.start + self.length - np.maximum(self.start, first_wanted)).clip(min=0)
        both = self.rank * len(chunks) + self.chunk
        of_each, at = np.unique(both[wanted > 0], return_inverse=True)
        counts = np.bincount(at, wanted[wanted > 0], len(of_each)).astype(np.int64)
        ranks, numbers = np.divmod(of_each, max(1, len(chunks)))
        requests = [chunks[number].request for number in numbers.tolist()]
        return Samples.of(requests, ranks, counts, world_size)

    def of_rank(self, rank: int, chunks: Seq[Chunk]) -> RankPlan:
        numbers = [number for number, chunk in enumerate(chunks) if rank in chunk.ranks]
        sequence = {number: i for i, number in enumerate(numbers)}
        plan = RankPlan([chunks[number] for number in numbers])
        mine = slice(*np.searchsorted(self.rank, (rank, rank + 1)))
        for number, form, start, length in zip(*(column[mine].tolist() for column in self[1:]), strict=True):
            segments = (plan.mha, plan.dense_mqa, plan.sparse_mqa)[form]
            segments.append(Segment(plan.rows, length, sequence[number], start))
            plan.rows += length
        return plan


@dataclass
class StepPlan:
    """One rank's plan of a step."""

    rank: int
    own: RankPlan  # the rows of this rank
    rows: np.ndarray  # int64 [ranks], number of rows, padding included
    decodes: bool  # whether this is a decode step: every chunk has few tokens, perhaps of a prompt, on one rank
    chunks: Seq[Chunk] = ()  # these and the segments are those of all ranks, in a step that prefills
    segments: SegmentTable | None = None
    decode: DecodeStep | None = None  # the step, if all requests decode
    bucket: Bucket | None = None  # set if the step is padded
    cuts: Mapping[Request, int] = field(default_factory=dict)  # positions at which its chunks are cut
    # In a decode step of ranks that hold contexts together: the chunks of each of them; else none.
    of_group: Seq[list[Chunk]] = ()
    micro_batches: tuple[StepPlan, StepPlan] | None = None  # set if a step that is not padded is cut
    num_drafts: int = 0  # that it makes for each request

    @classmethod
    def of(
        cls,
        chunks: Seq[Chunk],
        rank: int,
        world_size: int,
        config: ModelConfig,
        max_decode_rows: int = 1,
        cuts: Mapping[Request, int] | None = None,
    ) -> StepPlan:
        """Divides the chunks over the ranks. ``max_decode_rows``: maximum number of rows of a request in a decode step;
        ``cuts``: positions at which chunks are cut: the tokens before and after are divided each for itself."""
        table = SegmentTable.of(chunks, config, cuts or {})
        rows = np.bincount(table.rank, table.length, world_size).astype(np.int64)
        decodes = bool(chunks) and all(c.length <= max_decode_rows and len(c.ranks) == 1 for c in chunks)
        return cls(rank, table.of_rank(rank, chunks), rows, decodes, chunks, table, cuts=cuts or {})

    @classmethod
    def of_decode(
        cls,
        step: DecodeStep,
        rank: int,
        world_size: int,
        config: ModelConfig,
        bucket: Bucket | None = None,
        group: Seq[int] = (),
    ) -> StepPlan:
        """``group``: the ranks that hold contexts together with this one, of which the step has the chunks."""
        chunks, of_group = step.chunks, list[list[Chunk]]()
        if len(group) > 1:
            of_group = [[] for _ in group]
            for chunk in step.chunks:
                of_group[chunk.ranks.start - group[0]].append(chunk)
            chunks = of_group[rank - group[0]]
        if bucket is not None:
            rows, own = np.full(world_size, bucket.rows), RankPlan(chunks).padded(bucket, config.has_indexer)
        else:
            rows = np.bincount(step.samples.ranks, step.samples.counts, world_size).astype(np.int64)
            own = RankPlan.of_decode(chunks, config)
        return cls(rank, own, rows, True, decode=step, bucket=bucket, of_group=of_group)

    @cached_property
    def samples(self) -> Samples:
        """The rows with logits of all ranks; of a prefill made when its layers have been launched."""
        if self.decode is not None:
            return self.decode.samples
        assert self.segments is not None, "a step made of chunks"
        return self.segments.samples(self.chunks, len(self.rows))

    @property
    def for_graph(self) -> bool:
        """Whether it is padded to a shape that a graph may have."""
        return self.bucket is not None and self.bucket.for_graph

    def part(self, chunks: Seq[Chunk], *, after: bool) -> StepPlan:
        """The plan of ``chunks``, which are those of this step before its cuts, or ``after`` them; one without a cut is
        whole. No logits are wanted of it."""
        table, cuts, number = self.segments, self.cuts, {chunk.request: i for i, chunk in enumerate(chunks)}
        assert table is not None, "a step made of chunks"
        numbers = np.array([number.get(chunk.request, -1) for chunk in self.chunks])[table.chunk]
        cut = np.array([cuts.get(chunk.request, 0 if after else chunk.end) for chunk in self.chunks])[table.chunk]
        mine = (numbers >= 0) & ((table.start >= cut) == after)
        columns = (column[mine] for column in table._replace(chunk=numbers))
        part = SegmentTable(*columns)
        rows = np.bincount(part.rank, part.length, len(self.rows)).astype(np.int64)
        return StepPlan(self.rank, part.of_rank(self.rank, chunks), rows, self.decodes, chunks, part)

    @property
    def records(self) -> bool:
        """Whether the step records selections of any rank; the same on every rank."""
        if self.decode is not None:
            return bool(self.decode.asks & RECORDS)
        return any(chunk.num_logits and chunk.request.params.selection for chunk in self.chunks)

    def rows_by_form(self, config: ModelConfig) -> np.ndarray | int:
        """int64 ``[n, 3]``: rows in MHA, dense MQA and sparse MQA form of each chunk; if all requests decode, of each
        one of the samples, or the number of the form of all their rows."""
        if self.decode is None:
            rows, table = np.zeros((len(self.chunks), 3), np.int64), self.segments
            assert table is not None, "a step made of chunks"
            forms = table.form if self.bucket is None else np.full_like(table.form, 1 + config.has_indexer)
            np.add.at(rows, (table.chunk, forms), table.length)
            return rows
        count, first, limit = self.samples.counts, self.decode.starts, dense_tokens(config)
        if self.bucket is not None or int(first.min()) >= limit:  # as a rule
            return 1 + config.has_indexer
        dense = np.clip(limit - first, 0, count).astype(np.int64)
        in_mha = dense * (dense >= mha_min_queries(config))
        return np.stack((in_mha, dense - in_mha, count - dense), axis=1)

    def of_rank(self, rank: int) -> RankPlan:
        """The plan of any rank, without the padding of a bucket."""
        if rank == self.rank and self.bucket is None:
            return self.own
        assert self.segments is not None, "a step made of chunks"
        return self.segments.of_rank(rank, self.chunks)

    def padded(self, config: ModelConfig, contexts: ContextBuckets) -> StepPlan:
        """The decode step, made of chunks, in the smallest bucket that it fits in, which is the same on all ranks; the
        step itself where there is none."""
        bucket = bucket_of(self.chunks, contexts)
        if bucket is None:
            return self
        own = self.own.padded(bucket, config.has_indexer)
        return replace(self, own=own, rows=np.full(len(self.rows), bucket.rows), bucket=bucket)
