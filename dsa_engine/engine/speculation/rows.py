"""The rows of a decode step with drafts, and of the passes after it, at positions that only the device knows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from dsa_engine.engine.requests.request import Chunk, LastRows, Request
from dsa_engine.engine.steps.static_rows import StaticRows
from dsa_engine.model.forward_batch import ForwardBatch


def chunk_columns(chunks: Sequence[Chunk], page_size: int, rows: int) -> torch.Tensor:
    """A rank's chunks in a decode step, int64 ``[chunks, 3 + rows]`` on the host, for :meth:`StepRows.of`.

    The columns: position of the first row; number of rows; limit of the tokens that may be computed, which have pages
    and are not the request's very last; token of each row, 0 for padding or if only the device knows it.
    """
    table = []
    for chunk in chunks:
        request = chunk.request
        limit = min(len(request.pages) * page_size, len(request.prompt) + request.max_tokens - 1)
        ids = () if chunk.starts_on_device else request.tokens(chunk.start, chunk.length)
        table.append([chunk.start, chunk.length, limit, *ids, *[0] * (rows - len(ids))])
    return torch.tensor(table, dtype=torch.int64).view(-1, 3 + rows)


class StepRows(NamedTuple):
    """The rows of a decode step, ``1 + count`` for each of this rank's requests; int64."""

    batch: ForwardBatch
    first: torch.Tensor  # [requests], position of the first row
    limit: torch.Tensor  # [requests], tokens that may be computed
    token_ids: torch.Tensor  # [requests, 1 + count], 0 for padding
    positions: torch.Tensor  # [requests, 1 + count], -1 for padding
    offered: torch.Tensor  # [requests], number of drafts to verify

    @classmethod
    def of(
        cls,
        first: torch.Tensor,
        length: torch.Tensor,
        limit: torch.Tensor,
        token_ids: torch.Tensor,
        rows: StaticRows,
        tables: torch.Tensor,
    ) -> StepRows:
        """From the columns of :func:`chunk_columns`; ``tables``: block tables, int32 ``[requests, pages]``."""
        positions = first[:, None] + rows.offsets
        token_mask = (rows.offsets < length[:, None]) & (positions < limit[:, None])
        at = positions.where(token_mask, -1)
        batch = rows.batch(tables, at.flatten(), token_ids.flatten())
        return cls(batch, first, limit, token_ids, at, token_mask[:, 1:].sum(dim=1))


@dataclass(frozen=True)
class PassBuffers:
    """Tensors of a bucket's passes with fixed addresses."""

    rows: StaticRows  # the rows of a pass
    before: LastRows  # [requests, saved, …]: ``Request.last_rows`` before the step
    after: LastRows  # the same after the step

    @classmethod
    def of(cls, rows: StaticRows, saved: int) -> PassBuffers:
        """``saved``: positions of ``last_rows``."""
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
