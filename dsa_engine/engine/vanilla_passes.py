"""Vanilla mode behind a padded step: the passes of all modules in static shapes, as a part of a CUDA graph has them.

The rows are those of ``vanilla_drafts.py``: of a request with the first row at position p, the ``count - 1`` positions
before p and its own ``1 + count`` rows, ``2 · count`` in all. In a request's first tokens fewer lie before: its rows
begin at position 0, and those left over at the end are padding. Positions, slots, angles and tokens follow on the
device from the step's own batch, from what was sampled and from how much of it was accepted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from dsa_engine.engine.decode_graphs import DecodeGraphs
from dsa_engine.engine.draft_passes import BucketRows
from dsa_engine.engine.request import Chunk, LastRows, Request
from dsa_engine.engine.sampler import Samples
from dsa_engine.engine.step_plan import Bucket, StepPlan
from dsa_engine.kernels.transfer import upload
from dsa_engine.model.forward_batch import ForwardBatch
from dsa_engine.model.kv_cache import KVCache
from dsa_engine.model.model import Model
from dsa_engine.parallel import Mesh


@dataclass(frozen=True)
class KeptRows:
    """What the requests of a bucket keep from step to step (``Request.last_rows``), in buffers that stay."""

    before: LastRows  # [requests, count - 1, …], of the positions before each request's first row
    after: LastRows  # … before its first row in the next step
    rows: BucketRows  # 2 · count of every request

    @classmethod
    def of(cls, bucket: Bucket, count: int, model: Model) -> KeptRows:
        shape, device = (bucket.requests, count - 1), model.runtime.mesh.device
        states = torch.zeros(*shape, model.config.hidden_size, dtype=model.runtime.dtype, device=device)
        tokens = torch.zeros(shape, dtype=torch.int64, device=device)
        after = LastRows(torch.empty_like(states), torch.empty_like(tokens))
        return cls(LastRows(states, tokens), after, BucketRows.of(bucket, 2 * count, model))

    def load(self, chunks: list[Chunk]) -> None:
        """Takes what this rank's requests have kept; before the passes."""
        none = LastRows(*(torch.zeros_like(part[0]) for part in self.before))  # of a prompt that was never computed
        kept = [none if chunk.request.last_rows is None else chunk.request.last_rows for chunk in chunks]
        if chunks:
            torch.stack([rows.states for rows in kept], out=self.before.states[: len(chunks)])
            torch.stack([rows.tokens for rows in kept], out=self.before.tokens[: len(chunks)])

    def kept(self, chunks: list[Chunk]) -> Mapping[Request, LastRows]:
        """What they are to keep; behind the passes."""
        states, tokens = (part[: len(chunks)].clone() for part in self.after)
        return {chunk.request: LastRows(states[i], tokens[i]) for i, chunk in enumerate(chunks)}


class VanillaPasses:
    """Runs all modules behind a padded step.

    Args:
        model, cache, mesh: of the engine.
    """

    def __init__(self, model: Model, cache: KVCache, mesh: Mesh):
        self._model = model
        self._cache = cache
        self._mesh = mesh

    def __call__(
        self,
        batch: ForwardBatch,
        hidden: torch.Tensor,
        sampled: torch.Tensor,
        accepted: torch.Tensor,
        keeps: KeptRows,
    ) -> torch.Tensor:
        """Drafts of this rank's requests, int64 ``[requests, count]``; what they are to keep is written to ``keeps``.

        Args:
            batch, hidden: of the step, ``1 + count`` rows of every request; the model's hidden states ``[T, hidden]``.
            sampled: int64 ``[requests, 1 + count]``, the token behind each row.
            accepted: int64 ``[requests]``.
        """
        model, mesh = self._model, self._mesh
        requests, count = sampled.shape[0], sampled.shape[1] - 1
        seen = (batch.sparse_mqa if model.config.has_indexer else batch.dense_mqa).visible.view(requests, -1).long()
        first, length = seen[:, :1] - 1, (seen > 0).sum(dim=1, keepdim=True)
        columns = torch.arange(2 * count, device=hidden.device)
        # Of count - 1 positions before the first row, those before position 0 are left out.
        left_out = (count - 1 - first).clamp(min=0)
        positions = first - (count - 1) + left_out + columns
        at = positions.where((first >= 0) & (positions < first + length), -1).flatten()
        states = torch.cat((keeps.before.states, hidden.view(requests, -1, hidden.shape[1])), dim=1)
        own = batch.input_ids[mesh.tp.index].view(requests, -1)[:, :1]
        tokens = torch.cat((keeps.before.tokens, own, sampled, torch.zeros_like(sampled[:, 1:])), dim=1)
        keep = accepted[:, None] + 1 + columns[: count - 1]
        keeps.after.states.copy_(_rows_of(states, keep))
        keeps.after.tokens.copy_(tokens.gather(1, keep))
        places = left_out + columns
        state = _rows_of(states, places.clamp(max=2 * count - 1)).flatten(0, 1)
        last = (count - 1 - left_out + accepted[:, None]).clamp(min=0)
        one = keeps.rows.batch(model, self._cache.page_size, batch.block_tables, at, torch.zeros_like(at))
        drafts: list[torch.Tensor] = []
        for number in range(1, count + 1):
            ids = tokens.gather(1, (places + number).clamp(max=tokens.shape[1] - 1)).flatten()
            input_ids = mesh.tp.all_gather(ids).view(-1, len(ids))
            state = model.draft(number - 1, state, replace(one, input_ids=input_ids), self._cache)
            behind = _rows_of(state.view(requests, 2 * count, -1), last)[:, 0]
            drafts.append(model.own_logits(behind, requests, number - 1).argmax(dim=-1))
            tokens.scatter_(1, accepted[:, None] + count + number, drafts[-1][:, None])
        return torch.stack(drafts, dim=1)


@dataclass
class _Buffers:
    """What stays of a bucket from step to step; the first two are written anew in every step."""

    accepted: torch.Tensor  # [requests] int64
    sampled: torch.Tensor  # [requests, 1 + count] int64
    keeps: KeptRows


class PaddedVanillaDrafts:
    """Runs the passes behind a padded step whose tokens the sampler has chosen, kernel by kernel: a graph of their own.

    Args:
        model, cache, mesh: of the engine.
        passes: of the modules.
    """

    def __init__(self, model: Model, cache: KVCache, mesh: Mesh, passes: VanillaPasses):
        self._model = model
        self._cache = cache
        self._mesh = mesh
        self._passes = passes
        self._buffers: dict[Bucket, _Buffers] = {}

    def runs(self, step: StepPlan, count: int) -> bool:
        """Whether it is a padded step of requests that decode one token and verify up to ``count`` drafts."""
        chunks = [chunk for plan in step.ranks for chunk in plan.chunks]
        bucket = step.bucket
        return bucket is not None and bucket.rows_per_request == 1 + count and all(map(_verifies, chunks))

    def draft(
        self,
        step: StepPlan,
        batch: ForwardBatch,
        hidden: torch.Tensor,
        samples: Samples,
        accepted: torch.Tensor,
        graphs: DecodeGraphs,
    ) -> tuple[torch.Tensor, Mapping[Request, LastRows]]:
        """Drafts for all requests of all ranks; nothing waits for the device.

        Args:
            step, batch, hidden: of the padded step; ``batch`` and ``hidden [rows, hidden]`` stay where they are.
            samples: what was sampled from it.
            accepted: int64 ``[requests that are sampled]``.
            graphs: captures and replays the passes.

        Returns:
            int64 ``[ranks · requests of the bucket, count]``, valid until the next call, and what this rank's are to
            keep.
        """
        bucket = step.bucket
        assert bucket is not None
        count, chunks = bucket.rows_per_request - 1, step.ranks[self._mesh.rank].chunks
        buffers = self._buffers.get(bucket)
        if buffers is None:
            none = accepted.new_zeros(bucket.requests)
            keeps = KeptRows.of(bucket, count, self._model)
            buffers = self._buffers[bucket] = _Buffers(none, none.repeat(1 + count, 1).T.contiguous(), keeps)
        if chunks:  # the other rows are padding and hold anything
            order = {request: i for i, request in enumerate(samples.indices)}
            of = [(order[chunk.request], samples.indices[chunk.request]) for chunk in chunks]
            table = [[number, *where, *[where.start] * (1 + count - len(where))] for number, where in of]
            index = upload(torch.tensor(table), self._mesh.device)
            buffers.accepted[: len(chunks)] = accepted[index[:, 0]]
            # In place of a token there may be the negative code of an error: that request ends.
            buffers.sampled[: len(chunks)] = samples.tokens[index[:, 1:]].clamp(min=0)
        buffers.keeps.load(chunks)
        drafts = graphs.run(("drafts", bucket), lambda: self._run(buffers, batch, hidden))
        return drafts, buffers.keeps.kept(chunks)

    def _run(self, buffers: _Buffers, batch: ForwardBatch, hidden: torch.Tensor) -> torch.Tensor:
        drafts = self._passes(batch, hidden, buffers.sampled, buffers.accepted, buffers.keeps)
        return self._mesh.world.all_gather(drafts)


def _rows_of(states: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """``states [requests, n, hidden]`` at ``places [requests, m]``: ``[requests, m, hidden]``."""
    return states.gather(1, places[..., None].expand(-1, -1, states.shape[2]))


def _verifies(chunk: Chunk) -> bool:
    """Whether its request decodes, and every row of it is sampled."""
    return chunk.start >= chunk.request.num_prefill_tokens and chunk.num_logits == chunk.length
