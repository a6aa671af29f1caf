"""A decode step with drafts as one function of device tensors: model, choice of tokens, acceptance and draft passes.

All shapes are a bucket's, so the whole step is one CUDA graph, and nothing in it asks the host. What it leaves of every
request is an :class:`Outcome`: how many drafts were accepted, the tokens, the next drafts, and the position of the last
token. The next step may follow from that before the host has read it: then the host gives it the request's place in the
outcome, its pages and the limit up to which it may be computed, all for the case that every draft is accepted.

A request that turns out to have ended is part of one step too many. Its rows from its limit on are padding; what is
drawn from them is dropped with the rest.

What a request asks for and only the host can do in each step takes the longer way (``speculation.py``): the model's
graph, the sampler, the graph of the draft passes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F

from dsa_engine.engine.decode_graphs import DecodeGraphs
from dsa_engine.engine.draft_passes import BucketRows, DraftPasses
from dsa_engine.engine.draft_tokens import places_of
from dsa_engine.engine.logit_terms import is_biased, penalised, penalties_of
from dsa_engine.engine.outcome import Columns, Outcome
from dsa_engine.engine.pages import pages_for
from dsa_engine.engine.penalty_counts import PenaltyCounts, with_drafts
from dsa_engine.engine.request import Chunk, Request
from dsa_engine.engine.sample_logits import Draws, Limits, draw, draws_of
from dsa_engine.engine.sampler import NOT_FINITE, Samples, seed_of
from dsa_engine.engine.step_plan import Bucket, StepPlan
from dsa_engine.engine.vanilla_passes import KeptRows, VanillaPasses
from dsa_engine.kernels.transfer import download, upload
from dsa_engine.model.kv_cache import KVCache
from dsa_engine.model.model import Model
from dsa_engine.parallel import Mesh

# How many drafts of each request are taken to be accepted, int64 [n], from the keys of their seeds and the positions of
# their last tokens, int64 [n] each, and the most that there are: for measuring where tokens mean nothing.
Assume = Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]


class Kind(NamedTuple):
    """What the launches of a step depend on beside its bucket."""

    limits: Limits | None  # None: all requests are greedy
    penalises: bool
    assume: Assume | None


@dataclass
class _Buffers:
    """What stays of a bucket from step to step; the first three are written anew in every step."""

    inputs: torch.Tensor  # [fields, requests] int64, see _inputs
    before: torch.Tensor  # [requests, …] int64: of the outcome that each follows from
    tables: torch.Tensor  # [requests, pages] int32, block tables
    rows: BucketRows  # of the step
    ones: BucketRows  # one of every request, of a draft pass
    counts: torch.Tensor  # [requests, vocab + 1] int32, see PenaltyCounts; empty until a request penalises; shared
    offsets: torch.Tensor  # [rows of a request] int64: 0, 1, …
    first_rows: torch.Tensor  # [requests] int64
    keeps: KeptRows | None  # in vanilla mode


class SpeculativeSteps:
    """Runs decode steps in which every request verifies up to ``count`` drafts and gets as many new ones.

    Args:
        model, cache, mesh: of the engine.
        seed: of requests without a seed of their own.
        passes: of the MTP module.
        vanilla: instead of these, the passes of several modules.
    """

    def __init__(
        self,
        model: Model,
        cache: KVCache,
        mesh: Mesh,
        seed: int,
        passes: DraftPasses,
        vanilla: VanillaPasses | None = None,
    ):
        self._model = model
        self._cache = cache
        self._mesh = mesh
        self._seed = seed
        self._passes = passes
        self._vanilla = vanilla
        self._counts = PenaltyCounts(model.config.vocab_size)
        self._counts_in_step = torch.empty(0, dtype=torch.int32, device=mesh.device)
        self._buffers: dict[Bucket, _Buffers] = {}

    def kind(self, step: StepPlan, count: int, assume: Assume | None) -> Kind | None:
        """What runs a step here; None where it is not padded, is no such step, or needs the host."""
        bucket, chunks = step.bucket, [chunk for plan in step.ranks for chunk in plan.chunks]
        if bucket is None or bucket.rows_per_request != 1 + count or not all(map(_is_alone_on_device, chunks)):
            return None
        params, vocab = [chunk.request.params for chunk in chunks], self._model.config.vocab_size
        drawn = [p for p in params if p.temperature > 0]
        limits = Limits.of(drawn, vocab).rounded(vocab) if drawn else None
        return Kind(limits, any(p.penalises for p in params), assume)

    def run(self, step: StepPlan, kind: Kind, before: Outcome | None, graphs: DecodeGraphs) -> Samples:
        """Launches a step; nothing waits for the device.

        Args:
            step: a padded one.
            kind: of it.
            before: of the step before, for chunks that follow from it.
        """
        bucket = step.bucket
        assert bucket is not None
        buffers = self._buffers.get(bucket)
        if buffers is None:
            buffers = self._buffers[bucket] = self._make_buffers(bucket)
        chunks = step.ranks[self._mesh.rank].chunks
        places = before.places if before else {}
        upload(self._inputs(bucket, chunks, places), self._mesh.device, out=buffers.inputs)
        tables, (requests, width) = self._cache.block_tables, buffers.tables.shape
        table_rows = tables.rows([chunk.request.pages for chunk in chunks])
        tables.gather(table_rows + [0] * (requests - len(chunks)), width, out=buffers.tables)
        if before is not None and any(chunk.follows for chunk in chunks):
            torch.index_select(before.table, 0, buffers.inputs[0].clamp(min=0), out=buffers.before)
        if kind.penalises:
            if not buffers.counts.numel():
                buffers.counts = self._counts_of(requests)
            self._counts.update(chunks, buffers.before, buffers.counts)
        if buffers.keeps is not None:
            buffers.keeps.load(chunks)
        table = graphs.run((bucket, kind), lambda: self._step(buffers, kind))
        # Not where the graph leaves it: a step that an interrupt has cut off is launched again, and follows from this.
        samples = _samples(step, table.clone())
        return samples if buffers.keeps is None else replace(samples, last_rows=buffers.keeps.kept(chunks))

    def _counts_of(self, requests: int) -> torch.Tensor:
        """A buffer for the counts of a step: the same for all buckets but those that are larger than any before."""
        if len(self._counts_in_step) < requests:
            width = self._model.config.vocab_size + 1
            self._counts_in_step = torch.zeros(requests, width, dtype=torch.int32, device=self._mesh.device)
        return self._counts_in_step[:requests]

    def _inputs(self, bucket: Bucket, chunks: list[Chunk], places: Mapping[Request, int]) -> torch.Tensor:
        """int64 ``[fields, requests]``: place in the outcome before, -1 where the host knows its tokens; position of
        the first row; rows; tokens that may be computed; whether tokens are drawn; five of ``Draws``; three
        penalties, as the bits of float64; token ids."""
        width = bucket.rows_per_request
        requests = [chunk.request for chunk in chunks]
        rows = []
        for chunk, request in zip(chunks, requests, strict=True):
            limit = min(len(request.pages) * self._cache.page_size, len(request.prompt) + request.max_tokens - 1)
            ids = [] if chunk.follows else request.tokens(chunk.start, chunk.length)
            place = places[request] if chunk.follows else -1
            drawn = int(request.params.temperature > 0)
            rows.append([place, chunk.start, chunk.length, limit, drawn, *ids, *[0] * (width - len(ids))])
        known = torch.tensor(rows, dtype=torch.int64).view(len(rows), 5 + width).T
        seeds = [seed_of(request, self._seed) for request in requests]
        draws = draws_of([request.params for request in requests], seeds, self._model.config.vocab_size)
        penalties = penalties_of([request.params for request in requests]).view(torch.int64)
        table = torch.cat((known[:5], draws, penalties, known[5:]))
        padded = F.pad(table, (0, bucket.requests - len(rows)))
        padded[0, len(rows) :] = -1
        return padded

    def _step(self, buffers: _Buffers, kind: Kind) -> torch.Tensor:
        """The outcome's table ``[requests of all ranks, …]``, from the buffers and nothing else."""
        model, count = self._model, len(buffers.offsets) - 1
        place, first, length, limit, drawn = buffers.inputs[:5]
        draws, ids = Draws.of_columns(tuple(buffers.inputs[5:10])), buffers.inputs[13:].T
        before, follows = Columns.of(buffers.before), place >= 0
        first = before.position.where(follows, first)
        # In place of a token there may be the negative code of an error: that request has ended.
        ids = torch.cat((before.last_token, before.drafts), dim=1).where(follows[:, None], ids).clamp(min=0)
        positions = first[:, None] + buffers.offsets
        live = (buffers.offsets < length[:, None]) & (positions < limit[:, None])
        at = positions.where(live, -1).flatten()
        batch = buffers.rows.batch(model, self._cache.page_size, buffers.tables, at, ids.flatten())
        hidden = model(batch, self._cache)
        logits = model.own_logits(hidden, batch.rows)
        whole = logits.sum(dim=-1).isfinite()
        if kind.penalises:
            penalties = buffers.inputs[10:13].view(torch.float64).float().repeat_interleave(count + 1, dim=1)
            logits = penalised(logits, with_drafts(buffers.counts[:, :-1], ids), penalties)
        tokens = _choose(logits, draws, drawn, positions + 1, kind.limits)
        tokens = tokens.where(whole.view_as(tokens), NOT_FINITE)
        offered = live[:, 1:].sum(dim=1)
        if kind.assume is None:
            accepted = ((tokens[:, :-1] == ids[:, 1:]) & live[:, 1:]).long().cumprod(dim=1).sum(dim=1)
        else:
            accepted = kind.assume(draws.keys, first, count).minimum(offered)
        if buffers.keeps is not None and self._vanilla is not None:
            drafts = self._vanilla(batch, hidden, tokens.clamp(min=0), accepted, buffers.keeps)
        else:
            behind = self._mesh.tp.all_gather(tokens.clamp(min=0).flatten()).view(-1, batch.rows)
            last = buffers.first_rows + accepted
            drafts = self._passes(batch, hidden, behind, buffers.ones, last, first + accepted, limit, count)
        outcome = Columns(first + accepted + 1, offered, accepted, tokens, drafts)
        return self._mesh.world.all_gather(outcome.table())

    def _make_buffers(self, bucket: Bucket) -> _Buffers:
        requests, width, device = bucket.requests, bucket.rows_per_request, self._mesh.device
        pages = pages_for(bucket.context, self._cache.page_size)
        return _Buffers(
            inputs=torch.zeros(13 + width, requests, dtype=torch.int64, device=device),
            before=torch.zeros(requests, Columns.width(width - 1), dtype=torch.int64, device=device),
            tables=torch.zeros(requests, pages, dtype=torch.int32, device=device),
            rows=BucketRows.of(bucket, width, self._model),
            ones=BucketRows.of(bucket, 1, self._model),
            counts=torch.empty(0, dtype=torch.int32, device=device),
            offsets=torch.arange(width, device=device),
            first_rows=torch.arange(requests, device=device) * width,
            keeps=None if self._vanilla is None else KeptRows.of(bucket, width - 1, self._model),
        )


def _choose(
    logits: torch.Tensor, draws: Draws, drawn: torch.Tensor, positions: torch.Tensor, limits: Limits | None
) -> torch.Tensor:
    """A token for every row, int64 ``[requests, rows of each]`` as their ``positions``."""
    tokens = logits.argmax(dim=-1).view_as(positions)
    if limits is not None:
        each = positions.shape[1]
        of_rows = Draws(*(column.repeat_interleave(each) for column in draws))
        chosen = draw(logits, of_rows, positions.flatten(), limits).view_as(positions)
        tokens = chosen.where(drawn[:, None] > 0, tokens)
    return tokens


def _is_alone_on_device(chunk: Chunk) -> bool:
    """Whether a chunk is decoded, all of its rows sampled, and its sampling needs nothing of the host."""
    request, params = chunk.request, chunk.request.params
    decodes = chunk.start >= request.num_prefill_tokens and chunk.num_logits == chunk.length
    asks = params.logprobs is not None or len(request.output) < params.min_tokens
    return decodes and not asks and not is_biased(request) and not request.bad_words


def _samples(step: StepPlan, table: torch.Tensor) -> Samples:
    """What the host comes to know of an outcome; ``table`` is its own."""
    places, width = places_of(step), table.shape[1]
    lengths = [chunk.length for plan in step.ranks for chunk in plan.chunks]
    firsts = [place * width + 3 for place in places.values()]  # of ``Columns.tokens``
    indices = {
        request: range(first, first + length) for request, first, length in zip(places, firsts, lengths, strict=True)
    }
    rows = cache(download(table))
    outcome = Outcome(table, places)

    def codes() -> list[int]:
        return [code for row in rows() for code in row]

    return Samples(indices, table.flatten(), codes, None, verified=lambda: outcome.read(rows), outcome=outcome)
