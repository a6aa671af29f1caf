"""A decode step with drafts as one function of device tensors: model, choice of tokens, acceptance and draft passes.

All shapes are a bucket's, so the whole step is one CUDA graph, which never waits for the host. Its result for every
request is a row of an :class:`Outcome`: the number of accepted drafts, the tokens, the next drafts, and the position of
the last token. The next step may start from an outcome before the host has read it. For this the host provides the
request's row of the outcome, its pages, and the limit of its tokens, all for the case that every draft is accepted.

A request that turns out to have ended is part of one step too many. Its rows from its limit on are padding, and its
tokens are dropped.

If choosing a request's tokens needs the host, the whole step runs eagerly (``drafter.py``).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from dsa_engine.engine.requests.limits import pages_for
from dsa_engine.engine.requests.request import Chunk
from dsa_engine.engine.requests.samples import DRAWS, MIN_P, NOT_FINITE, PENALISES, TOP_P
from dsa_engine.engine.sampling.logits_processors import penalised, penalties_of
from dsa_engine.engine.sampling.penalty_counts import PenaltyCounts, with_drafts
from dsa_engine.engine.sampling.result import Columns, Outcome, StepResult, drafted
from dsa_engine.engine.sampling.sampler import Draws, Limits, draw, draws_of
from dsa_engine.engine.speculation.acceptance import AcceptanceRule
from dsa_engine.engine.speculation.passes import Passes
from dsa_engine.engine.speculation.rows import ChunkColumns, StepRows
from dsa_engine.engine.steps.graphs import DecodeGraphs
from dsa_engine.engine.steps.plan import Bucket, StepPlan
from dsa_engine.engine.steps.static_rows import StaticRows, block_tables_of
from dsa_engine.kernels.runtime.transfer import upload


class GraphKey(NamedTuple):
    """Name of a graph: everything that the launches of a step depend on."""

    bucket: Bucket
    limits: Limits | None  # None: all requests are greedy
    penalises: bool
    rule: AcceptanceRule


class Inputs(NamedTuple):
    """Inputs from the host for the n requests of a step, int64."""

    source: torch.Tensor  # [n], the request's row of the outcome before; -1 if the host knows its tokens
    drawn: torch.Tensor  # [n], 1 if tokens are drawn, 0 if they are the most likely
    draws: torch.Tensor  # [5, n], see ``Draws.of_columns``
    penalties: torch.Tensor  # [3, n], bits of float64, see ``penalties_of``
    chunks: torch.Tensor  # [3 + rows, n], see ``ChunkColumns``

    @classmethod
    def of(cls, table: torch.Tensor) -> Inputs:
        """Views of ``table [10 + 3 + rows, n]``."""
        return cls(table[0], table[1], table[2:7], table[7:10], table[10:])

    def table(self) -> torch.Tensor:
        """int64 ``[10 + 3 + rows, n]``."""
        return torch.cat((self.source[None], self.drawn[None], self.draws, self.penalties, self.chunks))


class _Buffers:
    """Tensors of a bucket with fixed addresses; the first three are overwritten in every step."""

    def __init__(self, bucket: Bucket, passes: Passes):
        requests, width, device = bucket.requests, bucket.rows_per_request, passes.mesh.device
        pages = pages_for(bucket.context, passes.cache.page_size)
        self.inputs = torch.zeros(13 + width, requests, dtype=torch.int64, device=device)  # see Inputs
        # Columns of the outcome before, for the requests that start from it.
        self.before = torch.zeros(requests, Columns.width(width - 1), dtype=torch.int64, device=device)
        self.tables = torch.zeros(requests, pages, dtype=torch.int32, device=device)  # block tables
        self.rows = StaticRows.of(bucket, width, passes.model, passes.cache.page_size, is_cut=bucket.is_cut)
        self.passes = passes.buffers(bucket)
        self.counts = torch.empty(0)  # PenaltyCounts.in_step, shared by buckets; empty until a request has penalties


class GraphStep:
    """Runs decode steps in which every request verifies up to ``count`` drafts and gets as many new ones."""

    def __init__(self, passes: Passes):
        self._passes = passes
        self._model, self._cache, self._mesh = passes.model, passes.cache, passes.mesh
        self._counts = PenaltyCounts(self._model.config.vocab_size, self._mesh.device)
        self._buffers: dict[Bucket, _Buffers] = {}

    def key(self, step: StepPlan, rule: AcceptanceRule) -> GraphKey:
        """The name of the graph that runs a padded step."""
        assert step.bucket is not None and step.decode is not None
        asks, vocab = step.decode.asks, self._model.config.vocab_size
        limits = None
        if asks & DRAWS:
            limits = Limits(bool(asks & MIN_P), min(step.decode.top_k, vocab), bool(asks & TOP_P)).rounded(vocab)
        return GraphKey(step.bucket, limits, bool(asks & PENALISES), rule)

    def run(self, step: StepPlan, key: GraphKey, before: Outcome | None, graphs: DecodeGraphs) -> StepResult:
        """Launches a step without waiting for the device.

        Args:
            step, key: a padded step and its key.
            before: outcome of the step before, for chunks that start on the device.
        """
        bucket = key.bucket
        buffers = self._buffers.get(bucket)
        if buffers is None:
            buffers = self._buffers[bucket] = _Buffers(bucket, self._passes)
        chunks = step.own.chunks
        upload(self._inputs(bucket, chunks, before).table(), self._mesh.device, out=buffers.inputs)
        block_tables_of(chunks, self._cache.block_tables, buffers.tables.shape, out=buffers.tables)
        if before is not None and any(chunk.starts_on_device for chunk in chunks):
            source = Inputs.of(buffers.inputs).source
            torch.index_select(before.table, 0, source.clamp(min=0), out=buffers.before)
        if key.penalises:
            if not buffers.counts.numel():
                buffers.counts = self._counts.in_step(bucket.requests)
            self._counts.update(chunks, buffers.before, buffers.counts)
        buffers.passes.load([chunk.request.last_rows for chunk in chunks])
        table = graphs.run(key, lambda: self._step(buffers, key))
        # A copy: another graph may use the same memory before this table is read.
        return drafted(step.samples, table.clone(), self._mesh.world_size, buffers.passes.last_rows(chunks))

    def _inputs(self, bucket: Bucket, chunks: list[Chunk], before: Outcome | None) -> Inputs:
        """The inputs on the host, padded to the bucket's requests."""
        requests, padding = [chunk.request for chunk in chunks], (0, bucket.requests - len(chunks))
        params = [request.params for request in requests]
        keys = [request.draw_key for request in requests]
        source = [-1] * len(chunks)
        if before is not None:
            following = iter(before.rows_of([chunk.request for chunk in chunks if chunk.starts_on_device]))
            source = [next(following) if chunk.starts_on_device else -1 for chunk in chunks]
        return Inputs(
            source=F.pad(torch.tensor(source, dtype=torch.int64), padding, value=-1),
            drawn=F.pad(torch.tensor([p.temperature > 0 for p in params], dtype=torch.int64), padding),
            draws=F.pad(draws_of(params, keys, self._model.config.vocab_size), padding),
            penalties=F.pad(penalties_of(params).view(torch.int64), padding),
            chunks=ChunkColumns.on_host(chunks, self._cache.page_size, bucket.rows_per_request, bucket.requests).T,
        )

    def _step(self, buffers: _Buffers, key: GraphKey) -> torch.Tensor:
        """Computes the outcome's table ``[requests of all ranks, …]`` from the buffers and nothing else."""
        model, width = self._model, buffers.rows.each
        inputs, before = Inputs.of(buffers.inputs), Columns.of(buffers.before)
        known, follows = ChunkColumns.of(inputs.chunks.T), inputs.source >= 0
        draws = Draws.of_columns(tuple(inputs.draws))
        # A negative token is the code of an error; its request has ended.
        ids = torch.cat((before.last_token, before.drafts), dim=1).where(follows[:, None], known.ids).clamp(min=0)
        columns = known._replace(first=before.position.where(follows, known.first), ids=ids)
        rows = StepRows.of(columns, buffers.rows, buffers.tables)
        hidden = model(rows.batch, self._cache)
        logits = model.logits(hidden, rows.batch.rows)
        finite = logits.sum(dim=-1).isfinite()
        if key.penalises:
            penalties = inputs.penalties.view(torch.float64).float().repeat_interleave(width, dim=1)
            logits = penalised(logits, with_drafts(buffers.counts[:, :-1], ids), penalties)
        tokens = _choose(logits, draws, inputs.drawn, rows, key.limits)
        tokens = tokens.where(finite.view_as(tokens), NOT_FINITE)
        accepted = key.rule(tokens, ids[:, 1:], draws.keys, columns.first).minimum(rows.offered)
        drafts = self._passes.after_decode(rows, hidden, tokens.clamp(min=0), accepted, buffers.passes)
        outcome = Columns(columns.first + accepted + 1, rows.offered, accepted, tokens, drafts)
        return self._mesh.world.all_gather(outcome.table())


def _choose(
    logits: torch.Tensor, draws: Draws, drawn: torch.Tensor, rows: StepRows, limits: Limits | None
) -> torch.Tensor:
    """Chooses a token for every row, int64 ``[requests, rows of each]``."""
    tokens = logits.argmax(dim=-1).view_as(rows.positions)
    if limits is not None:
        of_rows = Draws(*(column.repeat_interleave(rows.positions.shape[1]) for column in draws))
        chosen = draw(logits, of_rows, rows.positions.flatten() + 1, limits).view_as(rows.positions)
        tokens = chosen.where(drawn[:, None] > 0, tokens)
    return tokens
