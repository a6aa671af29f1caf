"""The passes of MTP modules after a step, by one module repeatedly or by several modules once each.

Eagle mode (:class:`EagleChain`): one module runs over the step's rows, and then repeatedly over one row of each
request, from its own hidden state and its last draft. With ``index_share_for_mtp_iteration`` (GLM-5.2) these later rows
attend to what the first pass has selected for the row that they go on from, and so not to themselves.

Vanilla mode (:class:`ModuleEach`): each of several modules drafts one token. Let a request have tokens t_0 … t_{m-1};
the model has computed the positions up to m - 2. Module k embeds t_{i+k} in its row at position i, so it can compute
rows from known tokens up to position m - 1 - k. Its rows after that, up to m - 2, embed drafts, and the last of them
drafts the token at m + k - 1. These rows are right if the drafts are accepted, and must be computed again if not. So a
step whose first row has position p computes the ``count - 1`` positions before p again, with the tokens now known: ``2
· count`` rows of a request, for all modules. Near the start of a request there are fewer positions before p; then the
rows begin at position 0, and the remaining ones are padding. The model's hidden states at these positions are saved
(``Request.last_rows``); those of the modules are computed from them. The chunks of a prompt need no states of an
earlier chunk: the last chunk has at least as many tokens as there are modules (``PrefixCache.least_computed``), so
all rows before it embed tokens of the prompt.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from dsa_engine.engine.cache.ledger import even_pages
from dsa_engine.engine.requests.limits import pages_for
from dsa_engine.engine.requests.request import Chunk, LastRows, Request
from dsa_engine.engine.requests.samples import key_of
from dsa_engine.engine.speculation.draft_sampler import DraftSampler
from dsa_engine.engine.steps.batch import known_ids
from dsa_engine.engine.steps.context_buckets import Bucket
from dsa_engine.engine.steps.plan import RankPlan, StepPlan
from dsa_engine.engine.steps.static_rows import StaticRows, StepRows, block_tables_of, chunk_columns
from dsa_engine.kernels.runtime.transfer import upload
from dsa_engine.model.forward_batch import ForwardBatch
from dsa_engine.model.kv_cache import KVCache
from dsa_engine.model.model import Model


@dataclass(frozen=True)
class PassBuffers:
    """Tensors of a bucket's passes with fixed addresses."""

    rows: StaticRows
    before: LastRows  # [requests, saved, …]: ``Request.last_rows`` before the step
    after: LastRows  # the same after the step

    @classmethod
    def of(cls, rows: StaticRows, saved: int) -> PassBuffers:
        model, shape = rows.model, (len(rows.segments), saved)
        device = model.runtime.mesh.device
        states = torch.zeros(*shape, model.config.hidden_size, dtype=model.runtime.dtype, device=device)
        before = LastRows(states, torch.zeros(shape, dtype=torch.int64, device=device))
        return cls(rows, before, LastRows(*map(torch.empty_like, before)))

    def load(self, last_rows: Sequence[LastRows | None]) -> None:
        """Sets ``before`` from this rank's requests; None for a request whose prompt was never computed."""
        if last_rows and self.before.tokens.numel():
            none = LastRows(*(torch.zeros_like(part[0]) for part in self.before))
            for parts, out in zip(zip(*(rows or none for rows in last_rows), strict=True), self.before, strict=True):
                torch.stack(parts, out=out[: len(last_rows)])

    def last_rows(self, chunks: Sequence[Chunk]) -> Mapping[Request, LastRows]:
        """The new ``Request.last_rows`` of these chunks, from ``after``."""
        if not self.after.tokens.numel():
            return {}
        states, tokens = (part[: len(chunks)].clone() for part in self.after)
        return {chunk.request: LastRows(states[i], tokens[i]) for i, chunk in enumerate(chunks)}


class PassInputs(NamedTuple):
    """A step of n requests of this rank whose drafts have been verified."""

    rows: StepRows
    hidden: torch.Tensor  # [n · (1 + count), hidden], the model's normed states
    tokens: torch.Tensor  # int64 [n, 1 + count], chosen after each row, none negative
    accepted: torch.Tensor  # int64 [n]
    sampler: DraftSampler  # of the requests' next drafts


class Passes(ABC):
    """Runs the MTP modules of a model. ``hooks``: each is called with the plan of passes whose rows are not those of
    the step."""

    def __init__(self, model: Model, cache: KVCache, hooks: list[Callable[[StepPlan], None]]):
        self.model = model
        self.cache = cache
        self.mesh = model.runtime.mesh
        self._hooks = hooks

    @abstractmethod
    def buffers(self, bucket: Bucket, max_visible: Sequence[int] = ()) -> PassBuffers:
        """Buffers of :meth:`after_decode` for a bucket; ``max_visible``: of the step's rows, see
        :meth:`StaticRows.of`."""

    @abstractmethod
    def after_decode(self, step: PassInputs, buffers: PassBuffers) -> torch.Tensor:
        """Makes drafts for a step's requests, int64 ``[n, count]``; always the same launches."""

    def after_eager_step(
        self,
        step: StepPlan,
        batch: ForwardBatch,
        hidden: torch.Tensor,
        own: list[Chunk],
        sampled: torch.Tensor,
        tokens: torch.Tensor,
        accepted: torch.Tensor,
        sampler: DraftSampler,
    ) -> tuple[torch.Tensor, Mapping[Request, LastRows]]:
        """Makes drafts, int64 ``[requests, count]``, and the new ``last_rows`` of this rank's requests after any step,
        by :meth:`after_decode` over the rows with chosen tokens. If the step has rows of prompts, the modules first run
        over all of its rows, which fills their caches.

        Args:
            step, batch, hidden: the step and its normed states ``[T, hidden]``.
            own: this rank's rows with logits, a chunk for each of its requests in the order of the sampler; as many
                requests as the rank with the most has are computed.
            sampled: int64, the tokens of all ranks as the sampler gives them; no token is negative here and below.
            tokens: int64 ``[requests, 1 + count]``, those of ``own``; void after the last of a request.
            accepted: int64 ``[requests]``.
            sampler: of the requests' next drafts.
        """
        width, fills = tokens.shape[1], step.decode is None
        last = self.fill(step, batch, hidden, sampled, width - 1) if fills else {}
        if step.samples.max_rows == 0:
            return tokens[:, 1:], {}
        bucket, rows, max_visible = self._static_rows(step, own, width)
        buffers = self.buffers(bucket, max_visible)
        buffers.load([_part(last[c.request], 0, -1) if c.request in last else c.request.last_rows for c in own])
        to = self._indices([i * width + j for i, chunk in enumerate(own) for j in range(chunk.length)])
        chosen_after = hidden[upload(step.own.rows_with_logits, self.mesh.device)]
        states = hidden.new_zeros(bucket.requests * width, hidden.shape[1]).index_copy_(0, to, chosen_after)
        drafts = self.after_decode(PassInputs(rows, states, tokens, accepted, sampler), buffers)
        filled = {request: _part(of, 1, None) for request, of in last.items() if request.owner == self.mesh.rank}
        return drafts, filled if fills else buffers.last_rows(own)

    def fill(
        self, step: StepPlan, batch: ForwardBatch, hidden: torch.Tensor, sampled: torch.Tensor, count: int
    ) -> Mapping[Request, LastRows]:
        """Runs the modules over all rows of a step, for ``count`` drafts; returns :meth:`_last_positions` if there are
        several."""
        states, requests = hidden, [chunk.request for chunk in step.chunks if chunk.num_logits]
        keys, indices = step.samples.keys.tolist(), step.samples.indices.tolist()
        first = dict(zip(keys, indices, strict=True))
        codes = {request: range(at := first[key_of(request)], at + 1) for request in requests}
        modules = min(count, len(self.model.mtp))
        for number in range(1, 1 + modules):
            ids = step.own.token_ids(batch.tp_rows, number, codes)
            input_ids = self.mesh.tp.all_gather(known_ids(ids, sampled, self.mesh.device))
            of_group = replace(batch, input_ids=input_ids.view(-1, batch.tp_rows))
            states, _ = self.model.draft(number - 1, states, of_group, self.cache)
        return self._last_positions(step, hidden, modules) if modules > 1 else {}

    def _last_positions(self, step: StepPlan, hidden: torch.Tensor, count: int) -> Mapping[Request, LastRows]:
        """The last ``count`` positions before the first chosen token of each request that this step has prefilled, from
        the ranks of its context-parallel group. Each has the states of some and adds zeros for the others."""
        group, numbers, to, rows = self.mesh.cp, dict[Request, int](), list[int](), list[int]()
        for chunk in step.chunks:
            if chunk.num_logits and chunk.ranks.start in group.ranks:
                numbers[chunk.request] = len(numbers)
        for s in step.own.segments:
            chunk = step.own.chunks[s.sequence]
            first = chunk.end - chunk.num_logits + 1 - count
            if chunk.request in numbers:
                positions = range(max(s.start, first), min(s.end, first + count))
                to += [numbers[chunk.request] * count + position - first for position in positions]
                rows += [s.row + position - s.start for position in positions]
        if not numbers:
            return {}
        own = hidden.new_zeros(len(numbers) * count, hidden.shape[1])
        own.index_copy_(0, self._indices(to), hidden[self._indices(rows)])
        states = group.all_gather(own).view(group.size, len(numbers), count, -1).sum(dim=0)
        ids = [[*[0] * (count - len(r)), *r.tokens(max(0, len(r) - count), min(count, len(r)))] for r in numbers]
        return dict(zip(numbers, map(LastRows, states, self._indices(ids)), strict=True))

    def _static_rows(self, step: StepPlan, own: list[Chunk], width: int) -> tuple[Bucket, StepRows, list[int]]:
        """This rank's chunks with logits in ``width`` rows of each request; their bucket, with this rank's context; and
        the maximum number of tokens that the rows of each request see."""
        page_size = self.cache.page_size
        of_group = self._of_group(step) or [own]
        # Padding rows of a request come after its last one, in the passes too.
        ranks = self.mesh.dcp.size
        longest = max((even_pages(chunk.request.pages, ranks) for of_rank in of_group for chunk in of_rank), default=0)
        max_pages = longest + pages_for(2 * width, page_size)
        bucket = Bucket(step.samples.max_requests, width, max_pages * page_size)
        padded = RankPlan(own).padded(bucket, self.model.config.has_indexer)
        rows = np.full(len(step.rows), bucket.rows)
        plan = StepPlan(step.rank, padded, rows, decodes=True, bucket=bucket)
        for hook in self._hooks:
            hook(plan)
        shape = self.cache.block_tables.shape(bucket.requests, bucket.context)
        tables = block_tables_of(of_group, self.cache, shape)
        missing = bucket.requests - len(own)
        columns = upload(F.pad(chunk_columns(own, page_size, width), (0, 0, 0, missing)), self.mesh.device)
        max_visible = [chunk.start + width for chunk in own] + [width] * missing
        static = StaticRows.of(bucket, width, self.model, self.cache, max_visible)
        first, length, limit = columns[:, :3].unbind(1)
        return bucket, StepRows.of(first, length, limit, columns[:, 3:], static, tables), max_visible

    def _of_group(self, step: StepPlan) -> Sequence[list[Chunk]]:
        """:attr:`.StepPlan.of_group`; after a prefill the chunks with logits of each rank."""
        if step.decode is not None or self.cache.group is None:
            return step.of_group
        chunks = {key_of(chunk.request): chunk for chunk in step.chunks if chunk.num_logits}
        keys = [step.samples.keys[step.samples.of_rank(rank)].tolist() for rank in self.cache.group.ranks]
        return [[chunks[key] for key in of_rank] for of_rank in keys]

    def _indices(self, numbers: list[int] | list[list[int]]) -> torch.Tensor:
        return upload(torch.tensor(numbers, dtype=torch.int64), self.mesh.device)

    def _draft(self, states: torch.Tensor, module: int, sampler: DraftSampler) -> torch.Tensor:
        """The next draft from each of a module's states ``[requests, hidden]``, int64 ``[requests]``."""
        return sampler(self.model.logits(states, len(states), self.model.mtp_head(module)))


class EagleChain(Passes):
    def buffers(self, bucket: Bucket, max_visible: Sequence[int] = ()) -> PassBuffers:
        in_last_pass = [tokens + bucket.rows_per_request - 2 for tokens in max_visible]
        return PassBuffers.of(StaticRows.of(bucket, 1, self.model, self.cache, in_last_pass), saved=0)

    def after_decode(self, step: PassInputs, buffers: PassBuffers) -> torch.Tensor:
        rows, hidden, tokens, accepted, sampler = step
        input_ids = self.mesh.tp.all_gather(tokens.flatten()).view(-1, rows.batch.rows)
        states, selection = self.model.draft(0, hidden, replace(rows.batch, input_ids=input_ids), self.cache)
        state = _rows_at(states.view(*tokens.shape, -1), accepted[:, None])[:, 0]
        if selection is not None and self.model.config.index_share_for_mtp_iteration:
            # Where ranks hold contexts together it is of the rows of all of them.
            of_rows = accepted if self.cache.group is None else self.cache.group.all_gather(accepted)
            selection = _rows_at(selection.view(len(of_rows), tokens.shape[1], -1), of_rows[:, None])[:, 0]
        else:
            selection = None
        position = rows.first + accepted
        drafts = [self._draft(state, 0, sampler)]
        for number in range(1, tokens.shape[1] - 1):
            at = position + number
            at, tables = at.where(at < rows.limit, -1), rows.batch.block_tables
            one = replace(buffers.rows.batch(tables, at, drafts[-1]), selection=selection)
            state, _ = self.model.draft(0, state, one, self.cache)
            drafts.append(self._draft(state, 0, sampler))
        return torch.stack(drafts, dim=1)


class ModuleEach(Passes):
    def buffers(self, bucket: Bucket, max_visible: Sequence[int] = ()) -> PassBuffers:
        count = bucket.rows_per_request - 1
        rows = StaticRows.of(bucket, 2 * count, self.model, self.cache, max_visible)
        return PassBuffers.of(rows, saved=count - 1)

    def after_decode(self, step: PassInputs, buffers: PassBuffers) -> torch.Tensor:
        rows, hidden, tokens, accepted, sampler = step
        requests, count = tokens.shape[0], tokens.shape[1] - 1
        first, length = rows.positions[:, :1], (rows.positions >= 0).sum(dim=1, keepdim=True)
        # The rows begin count - 1 positions before the first row, but not before position 0.
        left_out, columns = (count - 1 - first).clamp(min=0), buffers.rows.offsets
        positions = first - (count - 1) + left_out + columns
        at = positions.where((first >= 0) & (positions < first + length), -1).flatten()
        states = torch.cat((buffers.before.states, hidden.view(requests, 1 + count, -1)), dim=1)
        ids = torch.cat((buffers.before.tokens, rows.token_ids[:, :1], tokens, torch.zeros_like(tokens[:, 1:])), dim=1)
        keep = accepted[:, None] + 1 + columns[: count - 1]
        buffers.after.states.copy_(_rows_at(states, keep))
        buffers.after.tokens.copy_(ids.gather(1, keep))
        state = _rows_at(states, (left_out + columns).clamp(max=2 * count - 1)).flatten(0, 1)
        last = (count - 1 - left_out + accepted[:, None]).clamp(min=0)
        tables, nothing = rows.batch.block_tables, torch.zeros_like(at)
        batch = buffers.rows.batch(tables, at, nothing)
        drafts: list[torch.Tensor] = []
        for number in range(1, count + 1):
            embedded = ids.gather(1, (left_out + columns + number).clamp(max=ids.shape[1] - 1)).flatten()
            input_ids = self.mesh.tp.all_gather(embedded).view(-1, len(embedded))
            state, _ = self.model.draft(number - 1, state, replace(batch, input_ids=input_ids), self.cache)
            after_last = _rows_at(state.view(requests, 2 * count, -1), last)[:, 0]
            drafts.append(self._draft(after_last, number - 1, sampler))
            ids.scatter_(1, accepted[:, None] + count + number, drafts[-1][:, None])
        return torch.stack(drafts, dim=1)


def _rows_at(states: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """``states [requests, n, hidden]`` at ``rows [requests, m]``: ``[requests, m, hidden]``."""
    return states.gather(1, rows[..., None].expand(-1, -1, states.shape[2]))


def _part(rows: LastRows, first: int, last: int | None) -> LastRows:
    return LastRows(rows.states[first:last], rows.tokens[first:last])
