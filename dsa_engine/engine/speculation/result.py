"""What a step leaves of its requests: a table on the device, from which the next step follows, and what is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from dsa_engine.engine.request import Chunk, Request
from dsa_engine.engine.step_plan import StepPlan

FIRST_TOKEN = 3  # the column of a table where the tokens begin


class DraftResult(NamedTuple):
    """What came of a request's drafts in a step."""

    offered: int  # drafts that were verified
    accepted: int
    drafts: list[int]  # of the next tokens


class Columns(NamedTuple):
    """The columns of a table of n requests with up to ``count`` drafts each; int64."""

    position: torch.Tensor  # [n], of the last token, which is the first to be computed next
    offered: torch.Tensor  # [n], drafts that were verified
    accepted: torch.Tensor  # [n]
    tokens: torch.Tensor  # [n, 1 + count]: accepted drafts and the token after them, or codes of errors; then void
    drafts: torch.Tensor  # [n, count], of the tokens after these

    @classmethod
    def of(cls, table: torch.Tensor) -> Columns:
        """Views of ``table [n, width]``."""
        count = table.shape[1] // 2 - 2
        position, offered, accepted, tokens, drafts = table.split((1, 1, 1, 1 + count, count), dim=1)
        return cls(position[:, 0], offered[:, 0], accepted[:, 0], tokens, drafts)

    @staticmethod
    def width(count: int) -> int:
        """Number of columns."""
        return 4 + 2 * count

    @property
    def last_token(self) -> torch.Tensor:
        """int64 ``[n, 1]``: the token at ``position``."""
        return self.tokens.gather(1, self.accepted[:, None])

    def table(self) -> torch.Tensor:
        """int64 ``[n, width]``."""
        numbers = torch.stack((self.position, self.offered, self.accepted), dim=1)
        return torch.cat((numbers, self.tokens, self.drafts), dim=1)


class Outcome(NamedTuple):
    """The result of a step for the requests of all ranks."""

    table: torch.Tensor  # [n, width] int64, see Columns
    rows: Mapping[Request, int]  # each request's row of the table

    def read(self, download: Callable[[], list[Any]]) -> list[DraftResult]:
        """The result of each request; this is the oldest step that has not been read. ``download`` gives the table."""
        table, results = download(), []
        for request, row in self.rows.items():
            _, offered, accepted, *others = table[row]
            count, left = len(others) // 2, request.max_tokens - len(request.output) - accepted - 1
            # A request's last token is never drafted: nothing would be gained.
            results.append(DraftResult(offered, accepted, others[1 + count :][: max(0, left - 1)]))
        return results


def chunks_with_logits(step: StepPlan) -> list[list[Chunk]]:
    """The rows of each rank for which the step chooses tokens, a chunk of each request, in the order of the sampler."""
    by_rank = []
    for rank, plan in enumerate(step.ranks):
        wanted, ranks = {request for _, request in plan.logits_rows}, range(rank, rank + 1)
        chunks = [chunk for chunk in plan.chunks if chunk.request in wanted]
        by_rank.append([replace(c, start=c.end - c.num_logits, length=c.num_logits, ranks=ranks) for c in chunks])
    return by_rank


def gathered_rows(by_rank: list[list[Chunk]], each: int) -> dict[Request, int]:
    """Where the row of each request lies once the tables of all ranks, of ``each`` rows, are gathered."""
    return {chunk.request: rank * each + i for rank, chunks in enumerate(by_rank) for i, chunk in enumerate(chunks)}
