"""Vanilla mode: a checkpoint with several MTP modules drafts one token with each.

Of a request whose tokens t_0 … t_{m-1} are known, the model has computed the positions up to m - 2. The row of module k
at position i embeds t_{i+k}, so from true tokens it can be computed up to position m - 1 - k. The rows behind, up to
m - 2, embed drafts, and the last of them drafts the token at m + k - 1. They are right if these drafts are accepted; if
not, they have to be computed again. So each step computes as many positions before its own once more as there are
modules behind the first, whatever was accepted, with the tokens that are there by now.

For that the model's states at these last positions of a request are kept; those of the modules follow from them. All
modules run over the same rows. A prompt's chunks need no states of the chunk before: the scheduler leaves as many
tokens for the last chunk as there are modules, so every row before it embeds a token of the prompt.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Protocol

import torch
import torch.nn.functional as F

from dsa_engine.engine.batch import build_batch, known_ids
from dsa_engine.engine.draft_tokens import most_likely, of_all_ranks, ranks_of
from dsa_engine.engine.request import Chunk, LastRows, Request
from dsa_engine.engine.sampler import Samples
from dsa_engine.engine.step_plan import RankPlan, StepPlan, plans_of
from dsa_engine.kernels.transfer import upload
from dsa_engine.model.forward_batch import ForwardBatch
from dsa_engine.model.kv_cache import KVCache
from dsa_engine.model.model import Model
from dsa_engine.parallel import Mesh


class MakePlan(Protocol):
    """Makes the plan of a step from its chunks; ``max_decode_rows``: of a request, if it is a decode step."""

    def __call__(self, chunks: list[Chunk], max_decode_rows: int = 0) -> StepPlan: ...


class VanillaDrafts:
    """Runs the modules behind a step, one after the other.

    Args:
        model, cache, mesh: of the engine.
        plan: see :class:`MakePlan`.
    """

    def __init__(self, model: Model, cache: KVCache, mesh: Mesh, plan: MakePlan):
        self._model = model
        self._cache = cache
        self._mesh = mesh
        self._plan = plan

    def draft(
        self,
        step: StepPlan,
        batch: ForwardBatch,
        hidden: torch.Tensor,
        samples: Samples,
        accepted: torch.Tensor,
        count: int,
    ) -> tuple[torch.Tensor, Mapping[Request, LastRows]]:
        """Drafts ``count`` tokens for every request that is sampled; every rank takes part.

        Args:
            step, batch, hidden: of the step that the model has computed, ``hidden [T, hidden]``.
            samples: what was sampled from it; of nothing in the middle of a prompt.
            accepted: int64 ``[requests that are sampled]``, how many drafts each of them keeps.

        Returns:
            drafts, int64 ``[requests, count]``, and what this rank's requests are to keep.
        """
        kept: Mapping[Request, LastRows] = {}
        if count > 1 and _decodes(step):
            wider = self._plan(_with_rows_before(step, count - 1), 2 * count)
            hidden, kept = self._with_states_before(step, wider, hidden, samples, accepted, count - 1)
            step = wider
            batch = build_batch(
                step, self._model.config, self._mesh, self._cache.block_tables, None, input_ids=batch.input_ids
            )
        elif count > 1:
            kept = self._kept_of_prompts(step, hidden, samples, count - 1)
        tail, codes = _tail(samples, count)
        ranks, drafts = ranks_of(step, samples), []
        last = self._last_rows(step, samples, ranks, accepted)
        numbers = torch.arange(len(ranks), device=hidden.device)
        for number in range(1, count + 1):
            ids = [p.next_token_ids(batch.tp_rows, codes, number) for p in plans_of(step, self._mesh.tp)]
            input_ids = known_ids(torch.tensor(ids, dtype=torch.int64), tail.view(-1), self._mesh.device)
            hidden = self._model.draft(number - 1, hidden, replace(batch, input_ids=input_ids), self._cache)
            if ranks:
                tokens = most_likely(self._model, self._mesh, number - 1, hidden[last], ranks)
                drafts.append(of_all_ranks(self._mesh, tokens, ranks))
                tail[numbers, accepted + number] = drafts[-1]
        return torch.stack(drafts, dim=1) if drafts else tail, kept

    def _with_states_before(
        self,
        step: StepPlan,
        wider: StepPlan,
        hidden: torch.Tensor,
        samples: Samples,
        accepted: torch.Tensor,
        more: int,
    ) -> tuple[torch.Tensor, Mapping[Request, LastRows]]:
        """The model's states in the rows of ``wider``, of which ``more`` come before each chunk; and what this rank's
        requests are to keep."""
        plan, wide = step.ranks[self._mesh.rank], wider.ranks[self._mesh.rank]
        if not plan.chunks:
            return hidden, {}
        none = hidden.new_zeros(more, hidden.shape[1])  # of a prompt that was never computed (``Scheduler.adopt``)
        before = [none if (kept := chunk.request.last_rows) is None else kept.states for chunk in plan.chunks]
        states = torch.cat([hidden, *before])
        # Of each chunk, where the states from ``more`` positions before it on lie.
        index = [list(range(first := len(hidden) + i * more, first + more)) for i in range(len(plan.chunks))]
        for s in sorted(plan.segments, key=lambda s: s.start):
            index[s.sequence] += range(s.row, s.row + s.length)
        rows = [0] * wide.rows
        for s in wide.segments:
            skipped = s.start - (plan.chunks[s.sequence].start - more)
            rows[s.row : s.row + s.length] = index[s.sequence][skipped : skipped + s.length]
        # Kept are those that end with the last accepted draft, or with the token before the first draft.
        width = max(map(len, index))
        table = self._indices([of + [0] * (width - len(of)) for of in index])
        order = {request: i for i, request in enumerate(samples.indices)}
        counts = accepted[self._indices([order[chunk.request] for chunk in plan.chunks])]
        first_drafts = self._indices([chunk.length - chunk.num_logits + 1 for chunk in plan.chunks])
        columns = (first_drafts + counts)[:, None] + torch.arange(more, device=hidden.device)
        last, tokens = states[table.gather(1, columns)], self._tokens_of(plan.chunks, samples, more).gather(1, columns)
        kept_rows = {chunk.request: LastRows(last[i], tokens[i]) for i, chunk in enumerate(plan.chunks)}
        return states[self._indices(rows)], kept_rows

    def _tokens_of(self, chunks: list[Chunk], samples: Samples, more: int) -> torch.Tensor:
        """int64 ``[chunks, …]``: the tokens from ``more`` positions before each chunk on, then those sampled in it."""
        width = max(more + chunk.length for chunk in chunks)
        rows = []
        for chunk in chunks:
            first, end = chunk.start - more, chunk.end - chunk.num_logits + 1
            known = [0] * max(0, -first) + chunk.request.tokens(max(0, first), end - max(0, first))
            sampled = [-1 - index for index in samples.indices[chunk.request]]
            rows.append([*known, *sampled, *[0] * width][: width + 1])
        return known_ids(torch.tensor(rows, dtype=torch.int64), samples.tokens, self._mesh.device)

    def _kept_of_prompts(
        self, step: StepPlan, hidden: torch.Tensor, samples: Samples, more: int
    ) -> Mapping[Request, LastRows]:
        """What this rank's requests are to keep whose prompt ends here, of ``more`` positions: the ranks that have
        prefilled it together have the states."""
        wanted = [list(_last_rows_of_prompts(p, samples, more)) for p in plans_of(step, self._mesh.cp)]
        most = max(map(len, wanted))
        if most == 0:
            return {}
        found: dict[Request, list[int]] = {}
        for rank, rows in enumerate(wanted):
            for i, (request, place, _) in enumerate(rows):
                found.setdefault(request, [0] * more)[place] = rank * most + i
        own = hidden[self._indices([row for _, _, row in wanted[self._mesh.cp.index]])]
        states = self._mesh.cp.all_gather(F.pad(own, (0, 0, 0, most - len(own))))
        mine = [request for request in found if request.owner == self._mesh.rank]
        if not mine:
            return {}
        ids = [[0] * max(0, more - len(r)) + r.tokens(max(0, len(r) - more), min(more, len(r))) for r in mine]
        last, tokens = states[self._indices([found[request] for request in mine])], self._indices(ids)
        return {request: LastRows(last[i], tokens[i]) for i, request in enumerate(mine)}

    def _last_rows(self, step: StepPlan, samples: Samples, ranks: list[int], accepted: torch.Tensor) -> torch.Tensor:
        """int64: the row of each of this rank's requests behind which tokens are drafted, that of its last accepted
        draft."""
        mine = [i for i, rank in enumerate(ranks) if rank == self._mesh.rank]
        most = max(len(plan.logits_rows) for plan in step.ranks)
        firsts = [list(samples.indices.values())[i].start - self._mesh.rank * most for i in mine]
        rows = upload(step.ranks[self._mesh.rank].rows_with_logits, self._mesh.device)
        return rows[self._indices(firsts) + accepted[self._indices(mine)]]

    def _indices(self, numbers: list[int] | list[list[int]]) -> torch.Tensor:
        return upload(torch.tensor(numbers, dtype=torch.int64), self._mesh.device)


def _decodes(step: StepPlan) -> bool:
    """Whether it is a step of requests that decode; else it prefills."""
    chunk = next(chunk for plan in step.ranks for chunk in plan.chunks)
    return chunk.start >= chunk.request.num_prefill_tokens


def _with_rows_before(step: StepPlan, more: int) -> list[Chunk]:
    """The chunks of a decode step, each ``more`` positions longer at its beginning, as far as there are so many."""
    chunks = [chunk for plan in step.ranks for chunk in plan.chunks]
    return [
        replace(chunk, start=first, length=chunk.end - first)
        for chunk in chunks
        for first in [max(0, chunk.start - more)]
    ]


def _last_rows_of_prompts(plan: RankPlan, samples: Samples, more: int) -> Iterator[tuple[Request, int, int]]:
    """The rows of one rank among the ``more`` last positions of each prompt that ends in this step: request, which of
    these positions, row."""
    for s in plan.segments:
        chunk = plan.chunks[s.sequence]
        if chunk.request in samples.indices:
            first = chunk.end - more
            for position in range(max(s.start, first), s.end):
                yield chunk.request, position - first, s.row + position - s.start


def _tail(samples: Samples, count: int) -> tuple[torch.Tensor, Mapping[Request, range]]:
    """The tokens behind the known ones of every request: those that were sampled, and room for ``count`` drafts behind
    them, int64 ``[requests, …]`` on the device; and the codes of each request's (``RankPlan.next_token_ids``)."""
    device = samples.tokens.device
    sampled = max(map(len, samples.indices.values()), default=0)
    width = sampled + count
    rows = [[*of, *[of.start] * (width - len(of))] for of in samples.indices.values()]
    index = upload(torch.tensor(rows, dtype=torch.int64).view(len(rows), width), device)
    return samples.tokens[index], {
        request: range(i * width, (i + 1) * width) for i, request in enumerate(samples.indices)
    }
