"""The passes of MTP modules after a step: one interface, and eagle mode, in which one module makes all drafts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from dsa_engine.engine.batch import known_ids
from dsa_engine.engine.pages import pages_for
from dsa_engine.engine.request import Chunk, LastRows, Request
from dsa_engine.engine.speculation.result import gathered_rows
from dsa_engine.engine.speculation.rows import ChunkColumns, PassBuffers, StaticRows, StepRows, verifies
from dsa_engine.engine.step_plan import Bucket, RankPlan, StepPlan, plans_of
from dsa_engine.kernels.transfer import upload
from dsa_engine.model.forward_batch import ForwardBatch
from dsa_engine.model.kv_cache import KVCache
from dsa_engine.model.model import Model
from dsa_engine.parallel import Mesh


@dataclass(frozen=True)
class ChosenTokens:
    """The tokens that a step has chosen for n requests, which are counted rank by rank; the same on every rank."""

    by_rank: list[list[Request]]
    tokens: torch.Tensor  # [n, 1 + count] int64, none below 0; void after the last of a request
    accepted: torch.Tensor  # [n] int64

    @property
    def requests(self) -> list[Request]:
        return [request for requests in self.by_rank for request in requests]

    @property
    def count(self) -> int:
        """Drafts to be made of each request."""
        return self.tokens.shape[1] - 1

    @property
    def each(self) -> int:
        """Largest number of requests of a rank, 1 or more."""
        return max(1, *map(len, self.by_rank))

    def of_rank(self, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and accepted drafts of this rank's requests, padded to ``each`` requests with zeros."""
        first, count = sum(map(len, self.by_rank[:rank])), len(self.by_rank[rank])
        rows, missing = slice(first, first + count), self.each - count
        return F.pad(self.tokens[rows], (0, 0, 0, missing)), F.pad(self.accepted[rows], (0, missing))

    def gathered(self, mesh: Mesh, drafts: torch.Tensor) -> torch.Tensor:
        """``drafts [each, …]`` of every rank's requests, in one tensor ``[n, …]``; every rank takes part."""
        rows = list(gathered_rows(self.by_rank, self.each).values())
        return mesh.world.all_gather(drafts)[upload(torch.tensor(rows, dtype=torch.int64), mesh.device)]


class Passes(ABC):
    """Runs the MTP modules of a model.

    Args:
        model, cache, mesh: of the engine.
        observe: is called with the plan of passes whose rows are not those of the step.
    """

    def __init__(self, model: Model, cache: KVCache, mesh: Mesh, observe: Callable[[StepPlan], None]):
        self._model = model
        self._cache = cache
        self._mesh = mesh
        self._observe = observe

    @abstractmethod
    def buffers(self, bucket: Bucket) -> PassBuffers:
        """Those of :meth:`after_decode` for decode steps of this shape."""

    @abstractmethod
    def after_decode(
        self, rows: StepRows, hidden: torch.Tensor, tokens: torch.Tensor, accepted: torch.Tensor, buffers: PassBuffers
    ) -> torch.Tensor:
        """Drafts of this rank's requests, int64 ``[requests, count]``, by launches that are always the same.

        Args:
            rows: of the step.
            hidden: the model's normed states ``[requests · (1 + count), hidden]`` of these rows.
            tokens: int64 ``[requests, 1 + count]``, chosen after each row, none below 0.
            accepted: int64 ``[requests]``.
        """

    @abstractmethod
    def after_prefill(
        self, step: StepPlan, batch: ForwardBatch, hidden: torch.Tensor, chosen: ChosenTokens
    ) -> tuple[torch.Tensor, Mapping[Request, LastRows]]:
        """Drafts of the requests of all ranks, int64 ``[n, count]``, and what this rank's are to keep.

        Args:
            step, batch: of any step.
            hidden: its normed states ``[T, hidden]``.
            chosen: in it; n may be 0, in the middle of prompts.
        """

    def after_eager_step(
        self, step: StepPlan, batch: ForwardBatch, hidden: torch.Tensor, chosen: ChosenTokens
    ) -> tuple[torch.Tensor, Mapping[Request, LastRows]]:
        """The same as :meth:`after_prefill`; decode steps get the passes that they have in a graph."""
        by_rank = [plan.chunks for plan in step.ranks]
        if not all(verifies(chunk, chosen.count) for chunks in by_rank for chunk in chunks):
            return self.after_prefill(step, batch, hidden, chosen)
        mesh, width = self._mesh, 1 + chosen.count
        bucket, columns, tables = self._static_shape(by_rank, width)
        rows = StepRows.of(columns, StaticRows.of(bucket, width, self._model), tables, self._model, self._cache)
        buffers, own = self.buffers(bucket), by_rank[mesh.rank]
        buffers.load(own)
        index = logits_rows(step.ranks[mesh.rank], width, mesh.device)
        states = F.pad(hidden[index.flatten()], (0, 0, 0, (bucket.requests - len(own)) * width))
        drafts = self.after_decode(rows, states, *chosen.of_rank(mesh.rank), buffers)
        return chosen.gathered(mesh, drafts), buffers.kept(own)

    def _static_shape(self, by_rank: list[list[Chunk]], width: int) -> tuple[Bucket, ChunkColumns, torch.Tensor]:
        """The chunks of all ranks in ``width`` rows of each request: the shape, and this rank's columns and block
        tables."""
        own, page_size, tables = by_rank[self._mesh.rank], self._cache.page_size, self._cache.block_tables
        pages = [chunk.request.pages for chunk in own]
        most = max(map(len, pages), default=0) + pages_for(2 * width, page_size)  # missing rows follow the last ones
        bucket = Bucket(max(1, *map(len, by_rank)), width, most * page_size)
        selects = self._model.config.has_indexer
        self._observe(StepPlan([RankPlan(chunks).padded(bucket, selects) for chunks in by_rank], width, bucket))
        on_host = ChunkColumns.on_host(own, page_size, width, bucket.requests)
        columns = ChunkColumns.of(upload(on_host, self._mesh.device))
        return bucket, columns, tables.gather(tables.rows(pages) + [0] * (bucket.requests - len(own)), most)

    def _embedding(
        self, step: StepPlan, batch: ForwardBatch, codes: Mapping[Request, range], tokens: torch.Tensor, ahead: int
    ) -> ForwardBatch:
        """The step's rows with the tokens ``ahead`` positions after their own; see :meth:`RankPlan.next_token_ids`."""
        ids = [p.next_token_ids(batch.tp_rows, codes, ahead) for p in plans_of(step, self._mesh.tp)]
        on_host = torch.tensor(ids, dtype=torch.int64)
        return replace(batch, input_ids=known_ids(on_host, tokens.flatten(), self._mesh.device))

    def _last_rows(self, step: StepPlan, chosen: ChosenTokens) -> torch.Tensor:
        """int64 ``[requests of this rank]``: the row of each after which tokens are drafted, that of its last accepted
        draft."""
        index = logits_rows(step.ranks[self._mesh.rank], 1 + chosen.count, self._mesh.device)
        _, accepted = chosen.of_rank(self._mesh.rank)
        return index.gather(1, accepted[: len(index), None])[:, 0]

    def _most_likely(self, states: torch.Tensor, module: int) -> torch.Tensor:
        """int64 ``[requests]``: the token that the module's states ``[requests, hidden]`` draft."""
        return self._model.own_logits(states, len(states), module).argmax(dim=-1)


class EagleChain(Passes):
    """One module: it runs over the step's rows, and then alone, a row at a time, from its own state and last draft."""

    def buffers(self, bucket: Bucket) -> PassBuffers:
        return PassBuffers.of(bucket, each=1, kept=0, model=self._model)

    def after_decode(
        self, rows: StepRows, hidden: torch.Tensor, tokens: torch.Tensor, accepted: torch.Tensor, buffers: PassBuffers
    ) -> torch.Tensor:
        input_ids = self._mesh.tp.all_gather(tokens.flatten()).view(-1, rows.batch.rows)
        states = self._model.draft(0, hidden, replace(rows.batch, input_ids=input_ids), self._cache)
        last = rows_at(states.view(*tokens.shape, -1), accepted[:, None])[:, 0]
        tables, count = rows.batch.block_tables, tokens.shape[1] - 1
        return self._chain(last, rows.first + accepted, rows.limit, tables, buffers.rows, count)

    def after_prefill(
        self, step: StepPlan, batch: ForwardBatch, hidden: torch.Tensor, chosen: ChosenTokens
    ) -> tuple[torch.Tensor, Mapping[Request, LastRows]]:
        mesh, width = self._mesh, chosen.tokens.shape[1]
        codes = {request: range(i * width, (i + 1) * width) for i, request in enumerate(chosen.requests)}
        states = self._model.draft(0, hidden, self._embedding(step, batch, codes, chosen.tokens, 1), self._cache)
        if not codes:
            return chosen.tokens[:, 1:], {}
        alone = [
            [Chunk(request, len(request) - 1, 1, range(rank, rank + 1), 1) for request in requests]
            for rank, requests in enumerate(chosen.by_rank)
        ]
        bucket, columns, tables = self._static_shape(alone, 1)
        last, (_, accepted) = states[self._last_rows(step, chosen)], chosen.of_rank(mesh.rank)
        last = F.pad(last, (0, 0, 0, bucket.requests - len(last)))
        rows, at = StaticRows.of(bucket, 1, self._model), columns.first + accepted
        return chosen.gathered(mesh, self._chain(last, at, columns.limit, tables, rows, chosen.count)), {}

    def _chain(
        self,
        states: torch.Tensor,
        positions: torch.Tensor,
        limits: torch.Tensor,
        tables: torch.Tensor,
        rows: StaticRows,
        count: int,
    ) -> torch.Tensor:
        """Drafts int64 ``[requests, count]``.

        Args:
            states: ``[requests, hidden]``, the module's, of the last row of each.
            positions: int64 ``[requests]``, of these rows.
            limits: int64 ``[requests]``, tokens that may be computed.
            rows: one of every request.
        """
        drafts = [self._most_likely(states, 0)]
        for number in range(1, count):
            at = positions + number
            one = rows.batch(self._model, self._cache, tables, at.where(at < limits, -1), drafts[-1])
            states = self._model.draft(0, states, one, self._cache)
            drafts.append(self._most_likely(states, 0))
        return torch.stack(drafts, dim=1)


def rows_at(states: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """``states [requests, n, hidden]`` at ``rows [requests, m]``: ``[requests, m, hidden]``."""
    return states.gather(1, rows[..., None].expand(-1, -1, states.shape[2]))


def logits_rows(plan: RankPlan, width: int, device: torch.device) -> torch.Tensor:
    """int64 ``[requests, width]``: the rows of each request whose logits are wanted, the last of them again after it."""
    found: dict[Request, list[int]] = {}
    for row, request in plan.logits_rows:
        found.setdefault(request, []).append(row)
    table = [rows + rows[-1:] * (width - len(rows)) for rows in found.values()]
    return upload(torch.tensor(table, dtype=torch.int64).view(-1, width), device)
