"""Token counts for penalties, updated on the device before the host knows the tokens.

These are for steps that are one graph (``speculation/graph_step.py``). A table has a row for each request with
penalties: its counts, as :class:`.logits_processors.LogitsProcessors` has for other steps, and the position up to which
its tokens are counted. Before a step, the tokens before its first row are added, from the outcome of the previous step
or from the host. No token is counted twice, whatever was launched before.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dsa_engine.engine.requests.request import Chunk, Request
from dsa_engine.engine.sampling.logits_processors import PerRequestTable, of_prompt
from dsa_engine.engine.sampling.result import Columns
from dsa_engine.kernels.runtime.transfer import upload


class PenaltyCounts:
    """Counts for the requests of this rank that have penalties."""

    def __init__(self, vocab: int, device: torch.device):
        self._vocab = vocab
        self._in_step = torch.empty(0, vocab + 1, dtype=torch.int32, device=device)
        self._rows = PerRequestTable(torch.int32)  # [vocab + 1]: counts, and the first position that is not counted
        self._least: dict[Request, int] = {}  # the tokens of each are counted at least up to this position

    def in_step(self, requests: int) -> torch.Tensor:
        """int32 ``[requests, vocab + 1]`` for :meth:`update`; new memory only for more requests than ever before."""
        if len(self._in_step) < requests:
            self._in_step = self._in_step.new_zeros(requests, self._vocab + 1)
        return self._in_step[:requests]

    def update(self, chunks: Sequence[Chunk], before: torch.Tensor, out: torch.Tensor) -> None:
        """Counts the tokens before each chunk's first row, without waiting for the device.

        Args:
            chunks: this rank's chunks in a step.
            before: ``[requests, …]``, outcome of the step before; used for chunks that start on the device.
            out: int32 ``[requests, vocab + 1]``, receives the counts: 2 · occurrences in the output, + 1 if the prompt
                has the token. Rows of requests without penalties are void.
        """
        penalising = [(i, chunk) for i, chunk in enumerate(chunks) if chunk.request.params.penalises]
        if not penalising:
            return
        width = (before.shape[1] - 2) // 2  # rows of a request: its last token and the drafts
        slots = self._slots([chunk for _, chunk in penalising], 2 * width, before.device)
        table, table_rows = [], [0] * len(out)
        for i, chunk in penalising:
            request = chunk.request
            table_rows[i] = slots[request]
            known = request.num_known_tokens
            first = max(len(request.prompt), known - 2 * width)
            tokens, padding = request.tokens(first, known - first), [0] * (2 * width - known + first)
            table.append([i, slots[request], int(chunk.starts_on_device), first, known, *tokens, *padding])
        flat = upload(torch.tensor([*table_rows, *(x for row in table for x in row)]), before.device)
        columns = flat[len(out) :].view(len(table), -1).T
        self._add(columns[:5], columns[5:].T, Columns.of(before[columns[0]]))
        torch.index_select(self._rows.table, 0, flat[: len(out)], out=out)

    def _slots(self, chunks: Sequence[Chunk], window: int, device: torch.device) -> dict[Request, int]:
        """The row of each request; a new one, or one that lacks too many tokens, is counted again by the host."""
        for request in [r for r in self._least if r.finish_reason is not None]:
            del self._least[request]
        requests = [chunk.request for chunk in chunks]
        for request in requests:
            if request.num_known_tokens - self._least.get(request, 0) > window:
                self._rows.forget(request)
        slots = self._rows.slots(requests, self._counted, torch.empty(0, self._vocab + 1, device=device))
        for chunk in chunks:
            # The step in flight adds at least one.
            self._least[chunk.request] = chunk.request.num_known_tokens + chunk.starts_on_device
        return slots

    def _counted(self, request: Request) -> torch.Tensor:
        """The whole row of a request, int32 ``[vocab + 1]`` on the host."""
        counts = of_prompt(request, self._vocab)
        output = torch.tensor(request.output, dtype=torch.int64)
        counts.scatter_add_(0, output, torch.full_like(output, 2, dtype=torch.int32))
        return torch.cat((counts, counts.new_tensor([request.num_known_tokens])))

    def _add(self, about: torch.Tensor, known_ids: torch.Tensor, before: Columns) -> None:
        """Adds the tokens that each row lacks: the last ones that the host knows, and those of the outcome before."""
        _, slots, follows, first, known = about
        window, width = known_ids.shape[1], before.tokens.shape[1]
        number, followed = torch.arange(window + width, device=slots.device), follows[:, None] > 0
        of_host, of_outcome = first[:, None] + number[:window], number[:width]
        positions = torch.cat((of_host, (before.position - before.accepted)[:, None] + of_outcome), dim=1)
        exist = (of_host < known[:, None], followed & (of_outcome <= before.accepted[:, None]))
        counted = self._rows.table[:, self._vocab]
        new = torch.cat(exist, dim=1) & (positions >= counted[slots][:, None])
        at = slots[:, None] * (self._vocab + 1) + torch.cat((known_ids, before.tokens.clamp(min=0)), dim=1)
        self._rows.table.view(-1).scatter_add_(0, at.flatten(), (2 * new).int().flatten())
        counted.index_copy_(0, slots, (before.position + 1).where(followed[:, 0], known).int())


def with_drafts(counts: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Counts for each row of a step, its drafts included: int32 ``[requests · rows, vocab]``.

    Args:
        counts: int32 ``[requests, vocab]``, up to the first row of each request.
        ids: int64 ``[requests, rows]``, token of each row; a row counts its own draft and those before it.
    """
    requests, rows = ids.shape
    seen = counts[:, None].repeat(1, rows, 1)
    drafts = ids[:, None, 1:].expand(-1, rows, -1)
    number = torch.arange(rows, device=ids.device)
    up_to_own = (number[None, 1:] <= number[:, None]).int() * 2
    seen.scatter_add_(2, drafts, up_to_own.expand(requests, -1, -1).contiguous())
    return seen.flatten(0, 1)
