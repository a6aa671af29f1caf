"""Speculative decoding with an MTP module: drafts, and what the model makes of them.

One step of a request whose tokens are t_0 … t_{n-1}, the last of them not computed yet, with drafts d_1 … d_k of the
tokens behind:

1. The model computes 1 + k rows, of t_{n-1}, d_1 … d_k. The sampler chooses a token after each, s_0 … s_k, as it would
   have done one row at a time: the row of d_j sees the drafts before it, and its token is drawn with the random numbers
   of its own position.
2. A draft is *accepted* while it equals the token in its place: d_1 = s_0, d_2 = s_1, … The request goes on by the a
   drafts that are, and by s_a. So it gets the tokens that it would have got without drafts.
3. The module runs over the same rows with the model's hidden states and the tokens s_0 … s_k behind them, and drafts
   the token behind s_a. What it computes for the rows behind is void, and so are the model's cache rows of drafts that
   were not accepted: the next step writes them again, and nothing before that sees them.
4. In eagle mode the module goes on alone, a row at a time, from its own hidden state and its last draft. Its cache rows
   of these are void too.

A checkpoint with several modules drafts a token with each (``vanilla_drafts.py``).

So the caches of model and module hold the same positions, and one ``num_computed_tokens`` serves both. A step of
prefill is the same with rows of a prompt: only 3 and 4 follow, and under context parallelism they run on the ranks
that have the rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F

from dsa_engine.engine.batch import build_batch, known_ids
from dsa_engine.engine.decode_graphs import DecodeGraphs
from dsa_engine.engine.draft_passes import DraftPasses
from dsa_engine.engine.draft_tokens import most_likely, places_of, ranks_of
from dsa_engine.engine.outcome import Columns, Outcome, Verified, most_wanted
from dsa_engine.engine.padded_drafts import PaddedDrafts
from dsa_engine.engine.request import Chunk, Request
from dsa_engine.engine.sample_logits import seed_key
from dsa_engine.engine.sampler import Samples, seed_of
from dsa_engine.engine.speculative_step import Assume, Kind, SpeculativeSteps
from dsa_engine.engine.step_plan import StepPlan, plans_of
from dsa_engine.engine.vanilla_drafts import MakePlan, VanillaDrafts
from dsa_engine.engine.vanilla_passes import PaddedVanillaDrafts, VanillaPasses
from dsa_engine.kernels.transfer import download, upload
from dsa_engine.model.forward_batch import ForwardBatch
from dsa_engine.model.kv_cache import KVCache
from dsa_engine.model.model import Model
from dsa_engine.parallel import Mesh

NO_DRAFT = -3  # equals no token and no code of an error


class _Drafting(NamedTuple):
    """A request for which drafts are made."""

    request: Request
    rank: int  # that has its rows of logits
    length: int  # its tokens, those of this step included
    wanted: int  # drafts that it can use


class Drafter:
    """Runs the MTP module behind every step of the model.

    Args:
        model, cache, mesh: of the engine.
        plan: see :class:`.vanilla_drafts.MakePlan`.
        seed: of requests without a seed of their own.

    Attributes:
        steps: runs padded steps whole.
        assume: decides, in place of the tokens, how many drafts are accepted; for measuring where tokens mean nothing.
    """

    def __init__(self, model: Model, cache: KVCache, mesh: Mesh, plan: MakePlan, seed: int):
        self._model = model
        self._cache = cache
        self._mesh = mesh
        self._plan = plan
        self._seed = seed
        passes = DraftPasses(model, cache, mesh)
        self._static = PaddedDrafts(model, cache, mesh, passes)
        vanilla = VanillaPasses(model, cache, mesh) if len(model.mtp) > 1 else None
        self.steps = SpeculativeSteps(model, cache, mesh, seed, passes, vanilla)
        self._vanilla = VanillaDrafts(model, cache, mesh, plan) if vanilla else None
        self._static_vanilla = PaddedVanillaDrafts(model, cache, mesh, vanilla) if vanilla else None
        self.assume: Assume | None = None

    def kind(self, step: StepPlan, count: int) -> Kind | None:
        """Of a step that ``steps`` runs; None where :meth:`draft` is needed."""
        return self.steps.kind(step, count, self.assume)

    def draft(
        self,
        step: StepPlan,
        batch: ForwardBatch,
        hidden: torch.Tensor,
        samples: Samples,
        count: int,
        graphs: DecodeGraphs | None = None,
    ) -> Samples:
        """Finds what was accepted, and drafts the tokens behind; every rank takes part.

        Args:
            step, batch: of the step that the model has computed.
            hidden: its normed hidden states ``[T, hidden]``.
            samples: what was sampled from it.
            count: drafts of every request.
            graphs: run the passes of a padded step.
        """
        if self._vanilla is not None:
            return self._by_a_module_each(step, batch, hidden, samples, count, graphs)
        ids = [p.next_token_ids(batch.tp_rows, samples.indices) for p in plans_of(step, self._mesh.tp)]
        shifted = known_ids(torch.tensor(ids, dtype=torch.int64), samples.tokens, self._mesh.device)
        if step.bucket is not None and graphs is not None and samples.indices:
            return self._padded(step, batch, hidden, samples, shifted, count, graphs)
        passed_on = self._model.draft(0, hidden, replace(batch, input_ids=shifted), self._cache)
        if not samples.indices:
            return samples
        accepted = self._accepted(samples)
        mine = [i for i, rank in enumerate(ranks_of(step, samples)) if rank == self._mesh.rank]
        # Each request's last row: of its rows of logits, the one behind its accepted drafts.
        first = self._indices([list(samples.indices.values())[i].start for i in mine])
        most = max(len(p.logits_rows) for p in step.ranks)
        rows = upload(step.ranks[self._mesh.rank].rows_with_logits, hidden.device)
        last = rows[first - self._mesh.rank * most + accepted[self._indices(mine)]]
        verifies = any(request.drafts for request in samples.indices)
        # Which rows the next pass has depends on it: the host waits, but behind a prefill.
        known = accepted.tolist() if verifies else [0] * len(samples.indices)
        drafting = [
            _Drafting(request, rank, len(request) + kept + 1, most_wanted(_room(request) - kept - 1, count))
            for request, rank, kept in zip(samples.indices, ranks_of(step, samples), known, strict=True)
        ]
        table, places = self._chain(drafting, passed_on[last], count)
        outcome = None if verifies else self._after_prefill(samples, places, table)
        samples = replace(samples, outcome=outcome)
        return self._verified(samples, accepted, table, [places[request] for request in samples.indices], count)

    def _after_prefill(self, samples: Samples, places: dict[Request, int], drafts: torch.Tensor) -> Outcome:
        """Of requests that have a first token, and ``drafts [rows, count]``."""
        on_host = torch.zeros(2, len(drafts), dtype=torch.int64)
        for request, indices in samples.indices.items():
            on_host[:, places[request]] = torch.tensor((len(request), indices[0]))
        positions, index = upload(on_host, drafts.device)
        none = torch.zeros_like(positions)
        tokens = F.pad(samples.tokens[index][:, None], (0, drafts.shape[1]))
        return Outcome(Columns(positions, none, none, tokens, drafts).table(), places)

    def _padded(
        self,
        step: StepPlan,
        batch: ForwardBatch,
        hidden: torch.Tensor,
        samples: Samples,
        input_ids: torch.Tensor,
        count: int,
        graphs: DecodeGraphs,
    ) -> Samples:
        """The same in static shapes: the host does not wait for what was accepted."""
        assert step.bucket is not None
        accepted = self._accepted(samples)
        order = {request: i for i, request in enumerate(samples.indices)}
        drafts = self._static.draft(step, batch, hidden, input_ids, accepted, order, graphs)
        places = places_of(step)
        return self._verified(samples, accepted, drafts, [places[request] for request in samples.indices], count)

    def _by_a_module_each(
        self,
        step: StepPlan,
        batch: ForwardBatch,
        hidden: torch.Tensor,
        samples: Samples,
        count: int,
        graphs: DecodeGraphs | None,
    ) -> Samples:
        """Vanilla mode."""
        assert self._vanilla is not None and self._static_vanilla is not None
        accepted = self._accepted(samples) if samples.indices else samples.tokens
        if graphs is not None and self._static_vanilla.runs(step, count):
            drafts, kept = self._static_vanilla.draft(step, batch, hidden, samples, accepted, graphs)
            places = places_of(step)
            rows = [places[request] for request in samples.indices]
        else:
            drafts, kept = self._vanilla.draft(step, batch, hidden, samples, accepted, count)
            rows = list(range(len(drafts)))
        if not samples.indices:
            return samples
        samples = replace(samples, last_rows=kept)
        if not any(request.drafts for request in samples.indices):
            samples = replace(
                samples, outcome=self._after_prefill(samples, dict(zip(samples.indices, rows, strict=True)), drafts)
            )
        return self._verified(samples, accepted, drafts, rows, count)

    def _verified(
        self, samples: Samples, accepted: torch.Tensor, drafts: torch.Tensor, places: Sequence[int], count: int
    ) -> Samples:
        """With what was accepted, and the drafts that each request can use, which are read with the tokens; ``places``
        are the rows of ``drafts`` of the requests."""
        known, rows = download(accepted), download(drafts)
        about = [(len(request.drafts), _room(request)) for request in samples.indices]

        def verified() -> list[Verified]:
            table, found = rows(), []
            for kept, (offered, room), place in zip(known(), about, places, strict=True):
                wanted = most_wanted(room - kept - 1, count)
                found.append(Verified(offered, kept, table[place][:wanted]))
            return found

        return replace(samples, verified=verified)

    def _chain(
        self, drafting: list[_Drafting], hidden: torch.Tensor, count: int
    ) -> tuple[torch.Tensor, dict[Request, int]]:
        """Drafts for every request of all ranks, ``[rows, count]``, and the row of each.

        ``hidden`` are the module's states of this rank's, in their order.
        """
        mesh, ranks = self._mesh, [one.rank for one in drafting]
        mine = [one for one in drafting if one.rank == mesh.rank]
        tokens = most_likely(self._model, mesh, 0, hidden, ranks)
        drafts, active = [tokens], list(range(len(mine)))
        for number in range(1, count):
            going_on = [one for one in drafting if one.wanted > number]
            if not going_on:
                break
            still = [i for i, place in enumerate(active) if mine[place].wanted > number]
            active = [active[i] for i in still]
            kept = self._indices(still)
            hidden = self._next(going_on, hidden[kept], tokens[kept], number)
            tokens = most_likely(self._model, mesh, 0, hidden, [one.rank for one in going_on])
            drafts.append(tokens.new_zeros(len(mine)).index_copy_(0, self._indices(active), tokens))
        most = max(ranks.count(rank) for rank in set(ranks))
        table = F.pad(torch.stack(drafts, dim=1), (0, count - len(drafts), 0, most - len(mine)))
        places, seen = {}, [0] * mesh.world_size
        for one in drafting:
            places[one.request] = one.rank * most + seen[one.rank]
            seen[one.rank] += 1
        return mesh.world.all_gather(table), places

    def _next(self, drafting: list[_Drafting], hidden: torch.Tensor, tokens: torch.Tensor, number: int) -> torch.Tensor:
        """The module's row behind draft ``number``, of every request.

        Args:
            hidden: ``[requests of this rank, hidden]``, what the module passed on from the row before.
            tokens: that draft, ``[requests of this rank]``.
        """
        mesh = self._mesh
        step = self._plan(
            [Chunk(one.request, one.length - 2 + number, 1, range(one.rank, one.rank + 1), 1) for one in drafting]
        )
        rows = upload(step.ranks[mesh.rank].rows_with_logits, hidden.device)
        tp_rows = max(1, *(p.rows for p in plans_of(step, mesh.tp)))
        ids = tokens.new_zeros(tp_rows).index_copy_(0, rows, tokens)
        input_ids = mesh.tp.all_gather(ids).view(-1, tp_rows)
        batch = build_batch(step, self._model.config, mesh, self._cache.block_tables, None, input_ids=input_ids)
        ordered = torch.empty_like(hidden).index_copy_(0, rows, hidden)
        return self._model.draft(0, ordered, batch, self._cache)[rows]

    def _accepted(self, samples: Samples) -> torch.Tensor:
        if self.assume is None:
            return count_accepted(samples)
        about = [
            (seed_key(seed_of(request, self._seed)), len(request) - 1, len(request.drafts))
            for request in samples.indices
        ]
        keys, positions, offered = upload(torch.tensor(about, dtype=torch.int64).T.contiguous(), self._mesh.device)
        return self.assume(keys, positions, max(offered for *_, offered in about)).minimum(offered)

    def _indices(self, numbers: list[int]) -> torch.Tensor:
        return upload(torch.tensor(numbers, dtype=torch.int64), self._mesh.device)


def count_accepted(samples: Samples) -> torch.Tensor:
    """How many of its drafts each request of a step keeps: int64 ``[requests]``, on the device."""
    width = max(map(len, samples.indices.values()))
    rows, drafts = [], []
    for request, indices in samples.indices.items():
        padding = width - len(indices)
        rows.append([*indices, *[indices.start] * padding])
        drafts.append(request.drafts[: len(indices) - 1] + [NO_DRAFT] * padding)
    device = samples.tokens.device
    sampled = samples.tokens[upload(torch.tensor(rows), device)]
    guessed = upload(torch.tensor(drafts, dtype=torch.int64).view(len(rows), width - 1), device)
    return (sampled[:, :-1] == guessed).long().cumprod(dim=1).sum(dim=1)


def _room(request: Request) -> int:
    """Tokens that it may still get."""
    return request.max_tokens - request.num_output_tokens
