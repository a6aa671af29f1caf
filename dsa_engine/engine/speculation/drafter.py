"""Speculative decoding with MTP modules: verifies drafts and makes new ones.

A request has the tokens t_0 … t_{n-1}, of which the last is not computed yet, and drafts d_1 … d_k of the next tokens.
Its step is:

1. The model computes 1 + k rows, of t_{n-1}, d_1 … d_k. The sampler chooses a token after each row, s_0 … s_k, as if
   the rows were computed one at a time: the row of d_j sees the drafts before it, and its token is drawn with the
   random numbers of its position.
2. Drafts are *accepted* up to the first that differs from the chosen token: d_1 = s_0, d_2 = s_1, … With m accepted
   drafts, the request's next tokens are s_0 … s_m: the same tokens as without drafts.
3. The MTP module runs over the same rows, with the model's hidden states and the next tokens s_0 … s_k, and drafts the
   token after s_m. Its results for later rows are void. So are the cache rows of drafts that were not accepted: the
   next step overwrites them before it reads them.
4. In eagle mode the module goes on, a row at a time, from its own hidden state and its last draft. The cache rows of
   these passes are void too. In vanilla mode each of several modules drafts one token (``passes.py``).

So the caches of model and module hold the same positions, and one ``num_computed_tokens`` serves both. In prefill the
rows are those of a prompt and only 3 and 4 follow; under context parallelism they run on the ranks that have the rows.

A step runs as one CUDA graph (:meth:`Drafter.run`) if the device alone can choose its tokens: all shapes are a
bucket's. Its result for every request is a row of an :class:`Outcome`: the number of accepted drafts, the tokens, the
next drafts, and the position of the last token. The next step may start from an outcome before the host has read it.
For this the host provides the request's row of the outcome, its pages, and the limit of its tokens, all for the case
that every draft is accepted. A request that turns out to have ended is part of one step too many. Its rows from its
limit on are padding, and its tokens are dropped.

Other steps run eagerly: model and sampler as without drafts, then :meth:`Drafter.draft`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import reduce
from operator import or_
from typing import NamedTuple

import torch
import torch.nn.functional as F

from dsa_engine.engine.requests.request import Chunk, Request
from dsa_engine.engine.requests.samples import Columns, Outcome, StepResult
from dsa_engine.engine.sampling import chain
from dsa_engine.engine.sampling.chain import Parameters
from dsa_engine.engine.sampling.logits_processors import PenaltyCounts, indices, with_drafts, with_tokens
from dsa_engine.engine.sampling.thinking import FIELDS, put_ends, thoughts_of
from dsa_engine.engine.speculation.acceptance import AcceptanceRule, RelaxedAcceptance, count_equal
from dsa_engine.engine.speculation.draft_sampler import DraftSampler
from dsa_engine.engine.speculation.passes import EagleChain, ModuleEach, Passes, PassInputs
from dsa_engine.engine.steps.context_buckets import Bucket
from dsa_engine.engine.steps.graphs import DecodeGraphs
from dsa_engine.engine.steps.plan import StepPlan
from dsa_engine.engine.steps.static_rows import StaticRows, StepRows, block_tables_of, chunk_columns
from dsa_engine.kernels.runtime.integers import cdiv
from dsa_engine.kernels.runtime.transfer import upload
from dsa_engine.model.forward_batch import ForwardBatch
from dsa_engine.model.kv_cache import KVCache
from dsa_engine.model.model import Model
from dsa_engine.sampling_params import DRAWS, HAS_BUDGET, HAS_GRAMMAR, PENALISES


class GraphKey(NamedTuple):
    """Name of a graph: everything that the launches of a step depend on."""

    bucket: Bucket
    asks: int  # what any request asks, see ``chain.Inputs``
    top_k: int
    rule: AcceptanceRule


class Inputs(NamedTuple):
    """Inputs from the host for the n requests of a step, int64; one table, whose rows these fields are."""

    follows: torch.Tensor  # [1, n], 1 if the request starts from the outcome before, 0 if the host knows its tokens
    source: torch.Tensor  # [1, n], the request's row of that outcome
    thinks: torch.Tensor  # [1, n], see ``RelaxedAcceptance.replacing``; 0 without it
    thoughts: torch.Tensor  # [4, n], see ``thoughts_of``; void if no request has a budget
    parameters: torch.Tensor  # [fields, n], see ``Parameters.pack``
    chunks: torch.Tensor  # [3 + rows, n], see ``chunk_columns``

    @classmethod
    def of(cls, table: torch.Tensor) -> Inputs:
        heights = (1, 1, 1, FIELDS, len(Parameters._fields))
        return cls(*table.split((*heights, len(table) - sum(heights))))

    @staticmethod
    def zeros(requests: int, rows: int, device: torch.device) -> torch.Tensor:
        """A table for requests with so many rows."""
        height = 3 + FIELDS + len(Parameters._fields) + 3 + rows
        return torch.zeros(height, requests, dtype=torch.int64, device=device)


class _Buffers:
    """Tensors of a bucket with fixed addresses; the first three are overwritten in every step."""

    def __init__(self, bucket: Bucket, passes: Passes):
        requests, width, device = bucket.requests, bucket.rows_per_request, passes.mesh.device
        self.inputs = Inputs.zeros(requests, width, device)
        # Columns of the outcome before, for the requests that start from it.
        self.before = torch.zeros(requests, Columns.width(width - 1), dtype=torch.int64, device=device)
        shape = passes.cache.block_tables.shape(requests, bucket.context)
        self.tables = torch.zeros(shape, dtype=torch.int32, device=device)  # block tables
        self.rows = StaticRows.of(bucket, width, passes.model, passes.cache)
        self.passes = passes.buffers(bucket)
        self.counts = torch.empty(0)  # int32 [requests, vocab], shared by buckets; empty until a request has penalties
        self.masks = torch.empty(0)  # int32 [rows, vocab / 32]; empty until a request has a grammar


class Drafter:
    """Works after each step of the model or in one graph with it; for ``hooks`` see :class:`.Passes`; ``counts`` are
    those of the sampler."""

    def __init__(
        self,
        model: Model,
        cache: KVCache,
        hooks: list[Callable[[StepPlan], None]],
        counts: PenaltyCounts,
        relaxed: RelaxedAcceptance | None = None,
    ):
        self._relaxed = relaxed
        self._model, self._cache, self._mesh = model, cache, model.runtime.mesh
        self.passes: Passes = (ModuleEach if len(model.mtp) > 1 else EagleChain)(model, cache, hooks)
        self.rule: AcceptanceRule = count_equal
        self._counts = counts
        self._in_step = torch.empty(0, model.config.vocab_size, dtype=torch.int32, device=self._mesh.device)
        self._buffers: dict[Bucket, _Buffers] = {}

    def draft(
        self, step: StepPlan, batch: ForwardBatch, hidden: torch.Tensor, sampled: StepResult, count: int
    ) -> StepResult:
        """Accepts drafts after an eager step with normed states ``hidden [T, hidden]`` and makes ``count`` new ones for
        every request; every rank takes part. After prefills the next step may follow before the result is read.
        Without any the module's rows of prompts are filled, for later drafts."""
        if count == 0:
            self.passes.fill(step, batch, hidden, sampled.tokens.clamp(min=0), 1)
            return sampled
        samples, rank = step.samples, self._mesh.rank
        chosen = {request for request, *_ in step.own.wanted}
        chunks = [chunk for chunk in step.own.chunks if chunk.request in chosen]
        own = [replace(c, start=c.end - c.num_logits, length=c.num_logits) for c in chunks]
        first_codes, table = samples.indices[samples.of_rank(rank)].tolist(), []
        for first, chunk in zip(first_codes, own, strict=True):
            request, missing = chunk.request, 1 + count - chunk.length
            offered = request.drafts[: chunk.length - 1]
            codes = [*range(first, first + chunk.length), *[0] * missing]
            to_verify = [*offered, *[0] * (count - len(offered))]
            table.append([chunk.end - len(offered), len(offered), 0, *codes, *to_verify, request.draw_key])
        on_host = torch.tensor(table, dtype=torch.int64).view(len(table), Columns.width(count) + 1)
        missing = samples.max_requests - len(own)  # every rank has as many rows
        on_device = upload(F.pad(on_host, (0, 0, 0, missing)), self._mesh.device)
        known, keys = Columns.of(on_device[:, :-1]), on_device[:, -1]  # known.tokens are indices into the samples
        tokens = sampled.tokens[known.tokens] if samples.max_rows else known.tokens
        accepted = self.rule(tokens, known.drafts, keys, known.position - 1).minimum(known.offered)
        # A negative token is the code of an error, which ends its request.
        safe = sampled.tokens.clamp(min=0)
        position = known.position + accepted
        sampler = self._eager_sampler([chunk.request for chunk in own], position, tokens, accepted)
        drafts, last_rows = self.passes.after_eager_step(
            step, batch, hidden, own, safe, tokens.clamp(min=0), accepted, sampler
        )
        if samples.max_rows == 0:
            return sampled
        new = Columns(position, known.offered, accepted, tokens, drafts).table()
        of_all_ranks = self._mesh.world.all_gather(new)
        follows = int(samples.counts.max()) == 1  # the host knows the tokens of no drafts
        outcome = Outcome.of(of_all_ranks, samples, self._mesh.world_size)
        return replace(sampled, outcome=outcome, last_rows=last_rows, follows=follows)

    def _eager_sampler(
        self, requests: list[Request], position: torch.Tensor, tokens: torch.Tensor, accepted: torch.Tensor
    ) -> DraftSampler:
        """The sampler of the drafts of ``requests``, whose rows are the first of those of all arguments."""
        vocab, missing, table, counts = self._model.config.vocab_size, len(position) - len(requests), None, None
        asks = reduce(or_, (request.asks for request in requests), 0)
        top_k = max((request.params.num_best for request in requests), default=0)
        if asks & (DRAWS | PENALISES):
            params, keys = [request.params for request in requests], [request.draw_key for request in requests]
            table = upload(F.pad(Parameters.pack(params, keys, vocab), (0, missing)), self._mesh.device)
        if asks & PENALISES:
            counts = self._load_counts(requests, self._in_step.new_empty(len(position), vocab))
        return DraftSampler(chain.rounded(asks, top_k, vocab), table, counts, position, tokens, accepted)

    def key(self, step: StepPlan) -> GraphKey:
        """The name of the graph that runs a padded step."""
        assert step.bucket is not None and step.decode is not None
        kind = chain.rounded(step.decode.asks, step.decode.top_k, self._model.config.vocab_size)
        return GraphKey(step.bucket, *kind, self.rule)

    def run(
        self, step: StepPlan, before: Outcome | None, graphs: DecodeGraphs, masks: torch.Tensor | None = None
    ) -> StepResult:
        """Launches a padded step without waiting for the device. ``before``: outcome of the step before, for chunks
        that start on the device. ``masks``: for the bucket's rows, see :meth:`.GrammarMasks.masks`."""
        key, chunks = self.key(step), step.own.chunks
        buffers = self._buffers.get(key.bucket)
        if buffers is None:
            buffers = self._buffers[key.bucket] = _Buffers(key.bucket, self.passes)
        block_tables_of(step.of_group or [chunks], self._cache, buffers.tables.shape, out=buffers.tables)
        self._load(buffers, key, chunks, before, masks)
        # A copy: another graph may use the same memory before this table is read.
        table = graphs.run(key, lambda: self._step(buffers, key)).clone()
        outcome, last_rows = Outcome.of(table, step.samples, self._mesh.world_size), buffers.passes.last_rows(chunks)
        return StepResult(
            step.samples,
            table.new_empty(0),
            lambda: table,
            outcome=outcome,
            num_drafts=step.num_drafts,
            last_rows=last_rows,
        )

    def _load(
        self, buffers: _Buffers, key: GraphKey, chunks: list[Chunk], before: Outcome | None, masks: torch.Tensor | None
    ) -> None:
        """Sets everything that :meth:`_step` reads but for block tables."""
        bucket = key.bucket
        upload(self._inputs(bucket, chunks, before), self._mesh.device, out=buffers.inputs)
        if before is not None and any(chunk.starts_on_device for chunk in chunks):
            torch.index_select(before.table, 0, Inputs.of(buffers.inputs).source[0], out=buffers.before)
        if key.asks & PENALISES:
            if not buffers.counts.numel():
                if len(self._in_step) < bucket.requests:
                    self._in_step = self._in_step.new_zeros(bucket.requests, self._in_step.shape[1])
                buffers.counts = self._in_step[: bucket.requests]
            self._load_counts([chunk.request for chunk in chunks], buffers.counts)
        if key.asks & HAS_GRAMMAR:
            if not buffers.masks.numel():
                buffers.masks = self._in_step.new_empty(bucket.rows, cdiv(self._in_step.shape[1], 32))
            if masks is None:
                buffers.masks.fill_(-1)
            else:
                upload(masks, self._mesh.device, out=buffers.masks)
        buffers.passes.load([chunk.request.last_rows for chunk in chunks])

    def _load_counts(self, requests: list[Request], out: torch.Tensor) -> torch.Tensor:
        """Sets ``out``, int32 ``[n, vocab]``, to counts of the tokens that the host knows, and returns it. Its first
        rows are those of ``requests``, void for one without penalties."""
        known = {request: request.num_known_tokens for request in requests if request.params.penalises}
        if known:  # on this rank
            slots = self._counts.slots(known, out)
            rows = [slots.get(request, 0) for request in requests] + [0] * (len(out) - len(requests))
            torch.index_select(self._counts.rows.table, 0, indices(rows, out), out=out)
        return out

    def _inputs(self, bucket: Bucket, chunks: list[Chunk], before: Outcome | None) -> torch.Tensor:
        """The table of :class:`Inputs` on the host, padded with zeros to the bucket's requests."""
        requests = [chunk.request for chunk in chunks]
        follows, source = [chunk.starts_on_device for chunk in chunks], [0] * len(chunks)
        if before is not None:
            rows = iter(before.rows_of([chunk.request for chunk in chunks if chunk.starts_on_device]))
            source = [next(rows) if chunk.starts_on_device else 0 for chunk in chunks]
        thinks = [False] * len(chunks)
        if self._relaxed is not None:
            thinks = [self._relaxed.thinks(request) for request in requests]
        params, keys = [request.params for request in requests], [request.draw_key for request in requests]
        table = (
            torch.tensor([follows, source, thinks], dtype=torch.int64),
            thoughts_of(requests),
            Parameters.pack(params, keys, self._model.config.vocab_size),
            chunk_columns(chunks, self._cache.page_size, bucket.rows_per_request).T,
        )
        return F.pad(torch.cat(table), (0, bucket.requests - len(chunks)))

    def _step(self, buffers: _Buffers, key: GraphKey) -> torch.Tensor:
        """Computes the outcome's table ``[requests of all ranks, …]`` from the buffers and nothing else."""
        model, width = self._model, buffers.rows.each
        inputs, before = Inputs.of(buffers.inputs), Columns.of(buffers.before)
        (first, length, limit), follows = inputs.chunks[:3], inputs.follows[0] > 0
        # A negative token is the code of an error; its request has ended.
        known_ids, new_ids = inputs.chunks[3:].T, torch.cat((before.last_token, before.drafts), dim=1)
        ids = new_ids.where(follows[:, None], known_ids).clamp(min=0)
        first = before.position.where(follows, first)
        rows = StepRows.of(first, length, limit, ids, buffers.rows, buffers.tables)

        def is_unread() -> torch.Tensor:  # of the tokens of the outcome before
            return follows[:, None] & (buffers.rows.offsets <= before.accepted[:, None])

        hidden = model(rows.batch, self._cache)
        of_rows, of_requests, counts = chain.Inputs(key.asks, key.top_k), None, None
        if key.asks & (DRAWS | PENALISES):
            of_requests = inputs.parameters
            table = of_requests.repeat_interleave(width, dim=1)
            of_rows = of_rows._replace(table=table, positions=rows.positions.flatten() + 1)
        if key.asks & PENALISES:
            known = counts = with_tokens(buffers.counts, before.tokens, is_unread())
            of_rows = of_rows._replace(counts=lambda: with_drafts(known, ids))
        if key.asks & HAS_GRAMMAR:
            of_rows = of_rows._replace(masks=buffers.masks)
        if (relaxed := self._relaxed) is not None:
            unread, offered = before.tokens.where(is_unread(), -1), ids[:, 1:].where(rows.positions[:, 1:] >= 0, -1)
            replacing = F.pad(relaxed.replacing(inputs.thinks[0], unread, offered), (0, 1), value=-1).flatten()
            of_rows = of_rows._replace(put_drafts=lambda logits, tokens: relaxed.replace(logits, tokens, replacing))
        if key.asks & HAS_BUDGET:
            drafts_at = rows.positions[:, 1:]
            following = torch.cat((before.tokens.where(is_unread(), -1), ids[:, 1:].where(drafts_at >= 0, -1)), dim=1)
            at = torch.cat(((first - before.accepted)[:, None] + buffers.rows.offsets, drafts_at), dim=1)
            after = (following.repeat_interleave(width, dim=0), at.repeat_interleave(width, dim=0))
            of_each = rows.positions.flatten() + 1, inputs.thoughts.repeat_interleave(width, dim=1), *after
            of_rows = of_rows._replace(put_ends=lambda chosen: put_ends(chosen, *of_each))
        tokens = chain.chain(model.logits(hidden, rows.batch.rows), of_rows).view_as(ids)
        keys = Parameters.of(inputs.parameters).key
        accepted = key.rule(tokens, ids[:, 1:], keys, first).minimum(rows.offered)
        position = first + accepted + 1
        how = key.asks, key.top_k
        sampler = DraftSampler(how, of_requests, counts, position, tokens, accepted)
        of_passes = PassInputs(rows, hidden, tokens.clamp(min=0), accepted, sampler)
        drafts = self.passes.after_decode(of_passes, buffers.passes)
        outcome = Columns(position, rows.offered, accepted, tokens, drafts)
        return self._mesh.world.all_gather(outcome.table())
