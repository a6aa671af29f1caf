"""Vanilla mode: a checkpoint with several MTP modules drafts one token with each.

Of a request whose tokens t_0 … t_{m-1} are known, the model has computed the positions up to m - 2. The row of module k
at position i embeds t_{i+k}, so from true tokens it can be computed up to position m - 1 - k. The rows after that, up to
m - 2, embed drafts, and the last of them drafts the token at m + k - 1. They are right if these drafts are accepted; if
not, they have to be computed again. So each step computes as many positions before its own once more as there are
modules after the first, whatever was accepted, with the tokens that are there by now. Of a step whose first row has
position p these are the ``count - 1`` positions before p and its own ``1 + count`` rows, ``2 · count`` in all. Among a
request's first tokens fewer lie before: its rows begin at position 0, and those left over at the end are padding.

For that the model's states at these last positions of a request are kept; those of the modules follow from them. All
modules run over the same rows. A prompt's chunks need no states of the chunk before: the scheduler leaves as many
tokens for the last chunk as there are modules, so every row before it embeds a token of the prompt.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
import torch.nn.functional as F

from dsa_engine.engine.request import LastRows, Request
from dsa_engine.engine.speculation.passes import ChosenTokens, Passes, rows_at
from dsa_engine.engine.speculation.rows import PassBuffers, StepRows
from dsa_engine.engine.step_plan import Bucket, RankPlan, StepPlan, plans_of
from dsa_engine.kernels.transfer import upload
from dsa_engine.model.forward_batch import ForwardBatch


class SeveralModules(Passes):
    """Runs the modules one after the other, each of which drafts one token."""

    def buffers(self, bucket: Bucket) -> PassBuffers:
        count = bucket.rows_per_request - 1
        return PassBuffers.of(bucket, each=2 * count, kept=count - 1, model=self._model)

    def after_decode(
        self, rows: StepRows, hidden: torch.Tensor, tokens: torch.Tensor, accepted: torch.Tensor, buffers: PassBuffers
    ) -> torch.Tensor:
        model, mesh = self._model, self._mesh
        requests, count = tokens.shape[0], tokens.shape[1] - 1
        first, length = rows.positions[:, :1], (rows.positions >= 0).sum(dim=1, keepdim=True)
        columns = torch.arange(2 * count, device=hidden.device)
        # Of count - 1 positions before the first row, those before position 0 are left out.
        left_out = (count - 1 - first).clamp(min=0)
        positions = first - (count - 1) + left_out + columns
        at = positions.where((first >= 0) & (positions < first + length), -1).flatten()
        states = torch.cat((buffers.before.states, hidden.view(requests, 1 + count, -1)), dim=1)
        known = (buffers.before.tokens, rows.ids[:, :1].clamp(min=0), tokens, torch.zeros_like(tokens[:, 1:]))
        ids = torch.cat(known, dim=1)
        keep = accepted[:, None] + 1 + columns[: count - 1]
        buffers.after.states.copy_(rows_at(states, keep))
        buffers.after.tokens.copy_(ids.gather(1, keep))
        in_states = left_out + columns
        state = rows_at(states, in_states.clamp(max=2 * count - 1)).flatten(0, 1)
        last = (count - 1 - left_out + accepted[:, None]).clamp(min=0)
        one = buffers.rows.batch(model, self._cache, rows.batch.block_tables, at, torch.zeros_like(at))
        drafts: list[torch.Tensor] = []
        for number in range(1, count + 1):
            embedded = ids.gather(1, (in_states + number).clamp(max=ids.shape[1] - 1)).flatten()
            input_ids = mesh.tp.all_gather(embedded).view(-1, len(embedded))
            state = model.draft(number - 1, state, replace(one, input_ids=input_ids), self._cache)
            after_last = rows_at(state.view(requests, 2 * count, -1), last)[:, 0]
            drafts.append(self._most_likely(after_last, number - 1))
            ids.scatter_(1, accepted[:, None] + count + number, drafts[-1][:, None])
        return torch.stack(drafts, dim=1)

    def after_prefill(
        self, step: StepPlan, batch: ForwardBatch, hidden: torch.Tensor, chosen: ChosenTokens
    ) -> tuple[torch.Tensor, Mapping[Request, LastRows]]:
        count, (n, width) = chosen.count, chosen.tokens.shape
        kept = self._kept_of_prompts(step, hidden, chosen, count - 1) if count > 1 else {}
        tail = F.pad(chosen.tokens, (0, count))  # the tokens after the known ones, and room for drafts after these
        codes = {
            request: range(i * tail.shape[1], (i + 1) * tail.shape[1]) for i, request in enumerate(chosen.requests)
        }
        last, numbers = self._last_rows(step, chosen), torch.arange(n, device=hidden.device)
        drafts = [chosen.tokens[:, :0]]
        for number in range(1, count + 1):
            embedding = self._embedding(step, batch, codes, tail, number)
            hidden = self._model.draft(number - 1, hidden, embedding, self._cache)
            if n:
                states = F.pad(hidden[last], (0, 0, 0, chosen.each - len(last)))
                drafts.append(chosen.gathered(self._mesh, self._most_likely(states, number - 1))[:, None])
                tail[numbers, chosen.accepted + number] = drafts[-1][:, 0]
        return torch.cat(drafts, dim=1), kept

    def _kept_of_prompts(
        self, step: StepPlan, hidden: torch.Tensor, chosen: ChosenTokens, more: int
    ) -> Mapping[Request, LastRows]:
        """What this rank's requests are to keep whose prompt ends here, of ``more`` positions: the ranks that have
        prefilled it together have the states."""
        ending = set(chosen.requests)
        wanted = [list(_last_rows_of_prompts(plan, ending, more)) for plan in plans_of(step, self._mesh.cp)]
        most = max(map(len, wanted))
        if most == 0:
            return {}
        found: dict[Request, list[int]] = {}
        for rank, rows in enumerate(wanted):
            for i, (request, number, _) in enumerate(rows):
                found.setdefault(request, [0] * more)[number] = rank * most + i
        own = hidden[self._indices([row for _, _, row in wanted[self._mesh.cp.index]])]
        states = self._mesh.cp.all_gather(F.pad(own, (0, 0, 0, most - len(own))))
        mine = [request for request in found if request.owner == self._mesh.rank]
        if not mine:
            return {}
        ids = [[0] * max(0, more - len(r)) + r.tokens(max(0, len(r) - more), min(more, len(r))) for r in mine]
        last, tokens = states[self._indices([found[request] for request in mine])], self._indices(ids)
        return {request: LastRows(last[i], tokens[i]) for i, request in enumerate(mine)}

    def _indices(self, numbers: list[int] | list[list[int]]) -> torch.Tensor:
        return upload(torch.tensor(numbers, dtype=torch.int64), self._mesh.device)


def _last_rows_of_prompts(plan: RankPlan, ending: set[Request], more: int) -> Iterator[tuple[Request, int, int]]:
    """The rows of one rank among the ``more`` last positions of each prompt that ends in this step: request, which of
    these positions, row."""
    for s in plan.segments:
        chunk = plan.chunks[s.sequence]
        if chunk.request in ending:
            first = chunk.end - more
            for position in range(max(s.start, first), s.end):
                yield chunk.request, position - first, s.row + position - s.start
