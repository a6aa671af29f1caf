"""The passes of MTP modules after a step: by one module again and again, or by one each of several modules.

Eagle mode: one module runs over the step's rows, and then alone, a row of each request at a time, from its own state
and its last draft.

Vanilla mode: each of several modules drafts one token. Of a request whose tokens t_0 … t_{m-1} are known, the model has
computed the positions up to m - 2. The row of module k at position i embeds t_{i+k}, so from true tokens it can be
computed up to position m - 1 - k. The rows after that, up to m - 2, embed drafts, and the last of them drafts the token
at m + k - 1. They are right if these drafts are accepted; if not, they have to be computed again. So a step whose first
row has position p computes the ``count - 1`` positions before p once more, with the tokens that are there by now:
``2 · count`` rows of a request, for all modules. Among its first tokens fewer lie before: then the rows begin at
position 0, and those left over at the end are padding. For that the model's states at these positions are kept; those
of the modules follow from them. A prompt's chunks need no states of the chunk before: the scheduler leaves as many
tokens for the last chunk as there are modules, so every row before it embeds a token of the prompt.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F

from dsa_engine.engine.requests.pages import pages_for
from dsa_engine.engine.requests.request import Chunk, LastRows, Request
from dsa_engine.engine.speculation.rows import (
    ChunkColumns,
    PassBuffers,
    StaticRows,
    StepRows,
    chunks_with_logits,
    gathered_rows,
)
from dsa_engine.engine.steps.batch import known_ids
from dsa_engine.engine.steps.plan import Bucket, RankPlan, StepPlan, plans_of
from dsa_engine.kernels.runtime.transfer import upload
from dsa_engine.model.forward_batch import ForwardBatch
from dsa_engine.model.kv_cache import KVCache
from dsa_engine.model.model import Model
from dsa_engine.parallel import Mesh


class Passes(ABC):
    """Runs the MTP modules of a model.

    Args:
        model, cache, mesh: of the engine.
        observe: is called with the plan of passes whose rows are not those of the step.
    """

    def __init__(self, model: Model, cache: KVCache, mesh: Mesh, observe: Callable[[StepPlan], None]):
        self.model = model
        self.cache = cache
        self.mesh = mesh
        self._observe = observe

    @abstractmethod
    def buffers(self, bucket: Bucket, ends: Sequence[int] = ()) -> PassBuffers:
        """For :meth:`after_decode`, in steps of this shape; ``ends``: of the step's rows (:meth:`StaticRows.of`)."""

    @abstractmethod
    def after_decode(
        self, rows: StepRows, hidden: torch.Tensor, tokens: torch.Tensor, accepted: torch.Tensor, buffers: PassBuffers
    ) -> torch.Tensor:
        """Drafts of this rank's requests, int64 ``[requests, count]``, by launches that are always the same.

        Args:
            rows, hidden: of the step, with the model's normed states ``[requests · (1 + count), hidden]``.
            tokens: int64 ``[requests, 1 + count]``, chosen after each row, none below 0.
            accepted: int64 ``[requests]``.
        """

    def after_eager_step(
        self, step: StepPlan, batch: ForwardBatch, hidden: torch.Tensor, tokens: torch.Tensor, accepted: torch.Tensor
    ) -> tuple[torch.Tensor, Mapping[Request, LastRows]]:
        """Drafts after any step: by the passes that a decode step has in a graph, over the rows with chosen tokens.
        Where there are others, of prompts, the modules first run over all rows, which fills their caches.

        Args:
            step, batch, hidden: the step, with its normed states ``[T, hidden]``.
            tokens: int64 ``[n, 1 + count]``, chosen for the requests of all ranks in the order of the sampler, none
                below 0; void after the last of a request. n is 0 in the middle of prompts.
            accepted: int64 ``[n]``.

        Returns:
            int64 ``[n, count]``, and what this rank's requests are to keep.
        """
        by_rank, rank, width = chunks_with_logits(step), self.mesh.rank, tokens.shape[1]
        requests = [chunk.request for chunks in by_rank for chunk in chunks]
        fills = not all(verifies(chunk, width - 1) for plan in step.ranks for chunk in plan.chunks)
        last = self._fill(step, batch, hidden, requests, tokens) if fills else {}
        if not requests:
            return tokens[:, 1:], {}
        own, (bucket, rows, ends) = by_rank[rank], self._static_rows(by_rank, width)
        buffers = self.buffers(bucket, ends)
        buffers.load([_part(last[c.request], 0, -1) if c.request in last else c.request.last_rows for c in own])
        to = self._indices([i * width + j for i, chunk in enumerate(own) for j in range(chunk.length)])
        chosen_after = hidden[upload(step.ranks[rank].rows_with_logits, self.mesh.device)]
        states = hidden.new_zeros(bucket.requests * width, hidden.shape[1]).index_copy_(0, to, chosen_after)
        mine, missing = slice(first := sum(map(len, by_rank[:rank])), first + len(own)), bucket.requests - len(own)
        own_tokens, own_accepted = F.pad(tokens[mine], (0, 0, 0, missing)), F.pad(accepted[mine], (0, missing))
        drafts = self.after_decode(rows, states, own_tokens, own_accepted, buffers)
        at = self._indices([*gathered_rows(by_rank, bucket.requests).values()])
        kept = {request: _part(of, 1, None) for request, of in last.items() if request.owner == rank}
        return self.mesh.world.all_gather(drafts)[at], kept if fills else buffers.kept(own)

    def _fill(
        self, step: StepPlan, batch: ForwardBatch, hidden: torch.Tensor, requests: list[Request], tokens: torch.Tensor
    ) -> Mapping[Request, LastRows]:
        """Runs the modules over all rows of a step, in which ``tokens [n, 1 + count]`` are chosen for ``requests``.
        Several modules: returns as many :meth:`_last_positions` as there are."""
        width, states = tokens.shape[1], hidden
        codes = {request: range(i * width, (i + 1) * width) for i, request in enumerate(requests)}
        modules = min(width - 1, len(self.model.mtp))
        for number in range(1, 1 + modules):
            ids = [plan.next_token_ids(batch.tp_rows, codes, number) for plan in plans_of(step, self.mesh.tp)]
            input_ids = known_ids(torch.tensor(ids, dtype=torch.int64), tokens.flatten(), self.mesh.device)
            states = self.model.draft(number - 1, states, replace(batch, input_ids=input_ids), self.cache)
        return self._last_positions(step, hidden, codes, modules) if modules > 1 else {}

    def _last_positions(
        self, step: StepPlan, hidden: torch.Tensor, ending: Container[Request], count: int
    ) -> Mapping[Request, LastRows]:
        """The last ``count`` positions before the first chosen token of each request that is ``ending`` its prompt: the
        ranks of its context-parallel group have them together."""
        plans = plans_of(step, self.mesh.cp)
        rows = [_rows_of_last_positions(plan, ending, count) for plan in plans]
        if (most := max(map(len, rows))) == 0:
            return {}
        at = {key: rank * most + i for rank, found in enumerate(rows) for i, key in enumerate(found)}
        own = hidden[self._indices([*rows[self.mesh.cp.index].values()])]
        states = self.mesh.cp.all_gather(F.pad(own, (0, 0, 0, most - len(own))))
        requests = list(dict.fromkeys(request for request, _ in at))
        index = self._indices([[at.get((request, number), 0) for number in range(count)] for request in requests])
        ids = [[0] * (count - len(r)) + r.tokens(max(0, len(r) - count), min(count, len(r))) for r in requests]
        return dict(zip(requests, map(LastRows, states[index], self._indices(ids)), strict=True))

    def _static_rows(self, by_rank: list[list[Chunk]], width: int) -> tuple[Bucket, StepRows, list[int]]:
        """The chunks of this rank in ``width`` rows of each request; in a bucket whose context is this rank's; and how
        many tokens the rows of each may see."""
        own, tables, page_size = by_rank[self.mesh.rank], self.cache.block_tables, self.cache.page_size
        pages = [chunk.request.pages for chunk in own]
        # Missing rows of a request count as following its last one, in the passes too.
        most = max(map(len, pages), default=0) + pages_for(2 * width, page_size)
        bucket, selects = Bucket(max(1, *map(len, by_rank)), width, most * page_size), self.model.config.has_indexer
        self._observe(StepPlan([RankPlan(chunks).padded(bucket, selects) for chunks in by_rank], width, bucket))
        in_step = tables.gather(tables.rows(pages) + [0] * (bucket.requests - len(own)), most)
        columns = upload(ChunkColumns.on_host(own, page_size, width, bucket.requests), self.mesh.device)
        ends = [chunk.start + width for chunk in own] + [width] * (bucket.requests - len(own))
        static = StaticRows.of(bucket, width, self.model, ends)
        return bucket, StepRows.of(ChunkColumns.of(columns), static, in_step, self.model, page_size), ends

    def _indices(self, numbers: list[int] | list[list[int]]) -> torch.Tensor:
        return upload(torch.tensor(numbers, dtype=torch.int64), self.mesh.device)

    def _most_likely(self, states: torch.Tensor, module: int) -> torch.Tensor:
        """int64 ``[requests]``: the token that the module's states ``[requests, hidden]`` draft."""
        return self.model.logits(states, len(states), self.model.mtp_head(module)).argmax(dim=-1)


class EagleChain(Passes):
    """One module makes all drafts."""

    def buffers(self, bucket: Bucket, ends: Sequence[int] = ()) -> PassBuffers:
        furthest = [end + bucket.rows_per_request - 2 for end in ends]  # of its last pass
        return PassBuffers.of(bucket, each=1, kept=0, model=self.model, ends=furthest)

    def after_decode(
        self, rows: StepRows, hidden: torch.Tensor, tokens: torch.Tensor, accepted: torch.Tensor, buffers: PassBuffers
    ) -> torch.Tensor:
        input_ids = self.mesh.tp.all_gather(tokens.flatten()).view(-1, rows.batch.rows)
        states = self.model.draft(0, hidden, replace(rows.batch, input_ids=input_ids), self.cache)
        state = _rows_at(states.view(*tokens.shape, -1), accepted[:, None])[:, 0]
        position = rows.chunks.first + accepted
        drafts = [self._most_likely(state, 0)]
        for number in range(1, tokens.shape[1] - 1):
            at = position + number
            at, tables = at.where(at < rows.chunks.limit, -1), rows.batch.block_tables
            one = buffers.rows.batch(self.model, self.cache.page_size, tables, at, drafts[-1])
            state = self.model.draft(0, state, one, self.cache)
            drafts.append(self._most_likely(state, 0))
        return torch.stack(drafts, dim=1)


class ModuleEach(Passes):
    """Each of several modules drafts one token."""

    def buffers(self, bucket: Bucket, ends: Sequence[int] = ()) -> PassBuffers:
        count = bucket.rows_per_request - 1
        return PassBuffers.of(bucket, each=2 * count, kept=count - 1, model=self.model, ends=ends)

    def after_decode(
        self, rows: StepRows, hidden: torch.Tensor, tokens: torch.Tensor, accepted: torch.Tensor, buffers: PassBuffers
    ) -> torch.Tensor:
        requests, count = tokens.shape[0], tokens.shape[1] - 1
        first, length = rows.positions[:, :1], (rows.positions >= 0).sum(dim=1, keepdim=True)
        # Of count - 1 positions before the first row, those before position 0 are left out.
        left_out, columns = (count - 1 - first).clamp(min=0), buffers.rows.offsets
        positions = first - (count - 1) + left_out + columns
        at = positions.where((first >= 0) & (positions < first + length), -1).flatten()
        states = torch.cat((buffers.before.states, hidden.view(requests, 1 + count, -1)), dim=1)
        ids = torch.cat((buffers.before.tokens, rows.chunks.ids[:, :1], tokens, torch.zeros_like(tokens[:, 1:])), dim=1)
        keep = accepted[:, None] + 1 + columns[: count - 1]
        buffers.after.states.copy_(_rows_at(states, keep))
        buffers.after.tokens.copy_(ids.gather(1, keep))
        state = _rows_at(states, (left_out + columns).clamp(max=2 * count - 1)).flatten(0, 1)
        last = (count - 1 - left_out + accepted[:, None]).clamp(min=0)
        tables, nothing = rows.batch.block_tables, torch.zeros_like(at)
        batch = buffers.rows.batch(self.model, self.cache.page_size, tables, at, nothing)
        drafts: list[torch.Tensor] = []
        for number in range(1, count + 1):
            embedded = ids.gather(1, (left_out + columns + number).clamp(max=ids.shape[1] - 1)).flatten()
            input_ids = self.mesh.tp.all_gather(embedded).view(-1, len(embedded))
            state = self.model.draft(number - 1, state, replace(batch, input_ids=input_ids), self.cache)
            after_last = _rows_at(state.view(requests, 2 * count, -1), last)[:, 0]
            drafts.append(self._most_likely(after_last, number - 1))
            ids.scatter_(1, accepted[:, None] + count + number, drafts[-1][:, None])
        return torch.stack(drafts, dim=1)


def verifies(chunk: Chunk, count: int) -> bool:
    """Whether a request decodes, and all rows of the chunk are its last token and up to ``count`` drafts."""
    return chunk.start >= chunk.request.num_prefill_tokens and chunk.num_logits == chunk.length <= 1 + count


def _rows_of_last_positions(plan: RankPlan, ending: Container[Request], count: int) -> dict[tuple[Request, int], int]:
    """The rows of one rank among the last ``count`` positions of each request before its first chosen token, by request
    and number of the position."""
    found: dict[tuple[Request, int], int] = {}
    for s in plan.segments:
        chunk = plan.chunks[s.sequence]
        first = chunk.end - chunk.num_logits + 1 - count
        if chunk.request in ending:
            last = range(max(s.start, first), min(s.end, first + count))
            found |= {(chunk.request, position - first): s.row + position - s.start for position in last}
    return found


def _rows_at(states: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """``states [requests, n, hidden]`` at ``rows [requests, m]``: ``[requests, m, hidden]``."""
    return states.gather(1, rows[..., None].expand(-1, -1, states.shape[2]))


def _part(rows: LastRows, first: int, last: int | None) -> LastRows:
    return LastRows(rows.states[first:last], rows.tokens[first:last])
