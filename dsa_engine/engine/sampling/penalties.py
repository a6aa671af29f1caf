"""Penalties for tokens that a request already has, and counts of its tokens on the device.

The tokens that the host knows are counted once, in a table. What it does not know yet, and drafts, are counted for
single rows of logits: by :func:`add_occurrences` in eager steps, by :func:`with_unread` in steps that are one graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from weakref import WeakKeyDictionary

import numpy as np
import torch

from dsa_engine.engine.requests.request import Request
from dsa_engine.engine.requests.samples import Columns
from dsa_engine.engine.steps.batch import known_ids
from dsa_engine.kernels.runtime.integers import next_power_of_2
from dsa_engine.kernels.runtime.transfer import upload


class PerRequestTable:
    """A growing table on the device with a row ``[vocab]`` for each request; rows of ended requests are reused."""

    def __init__(self, dtype: torch.dtype):
        self.table = torch.empty(0, 0, dtype=dtype)
        self._slots: dict[Request, int] = {}

    def slots(
        self, requests: Sequence[Request], make: Callable[[Request], torch.Tensor], like: torch.Tensor
    ) -> dict[Request, int]:
        """The index of each request's row; ``make`` returns the content of a new row, on the host."""
        for request in [r for r in self._slots if r.finish_reason is not None]:
            del self._slots[request]
        new = [request for request in dict.fromkeys(requests) if request not in self._slots]
        if new:
            used = set(self._slots.values())
            free = [slot for slot in range(len(used) + len(new)) if slot not in used][: len(new)]
            if (rows := max(free) + 1) > len(self.table):
                grown = torch.zeros(next_power_of_2(rows), like.shape[1], dtype=self.table.dtype, device=like.device)
                if len(self.table):
                    grown[: len(self.table)] = self.table
                self.table = grown
            self.table[indices(free, like)] = upload(torch.stack([make(request) for request in new]), like.device)
            self._slots.update(zip(new, free, strict=True))
        return self._slots


class PenaltyCounts:
    """Counts of the tokens that the host knows: 2 · occurrences in the output, + 1 if the prompt has the token.

    Attributes:
        rows: int32 ``[vocab]`` for each request.
    """

    def __init__(self) -> None:
        self.rows = PerRequestTable(torch.int32)
        self._counted: WeakKeyDictionary[Request, int] = WeakKeyDictionary()  # output tokens that are in the table

    def slots(self, until: Mapping[Request, int], like: torch.Tensor) -> dict[Request, int]:
        """Counts the known tokens of requests that are before a position of each, and returns the index of each one's
        row; see also :meth:`PerRequestTable.slots`. The position never falls."""
        new: list[tuple[int, int]] = []
        slots = self.rows.slots([*until], lambda request: _of_prompt(request, like.shape[1]), like)
        for request, position in until.items():
            tokens = request.output[self._counted.get(request, 0) : position - len(request.prompt)]
            new += [(slots[request], token) for token in tokens]
            self._counted[request] = self._counted.get(request, 0) + len(tokens)
        add_occurrences(self.rows.table, new)
        return slots


def with_unread(counts: torch.Tensor, before: Columns, follows: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Counts for each row of a step, with its drafts and the tokens of the step before: int32 ``[requests · rows,
    vocab]``.

    Args:
        counts: int32 ``[requests, vocab]``, of the tokens that the host knows.
        before: the step before; ``follows``: bool ``[requests]``, whether the host has not read its tokens.
        ids: int64 ``[requests, rows]``, token of each row; a row counts its own draft and those before it.
    """
    requests, rows = ids.shape
    number = torch.arange(rows, device=ids.device)
    unread = follows[:, None] & (number <= before.accepted[:, None])
    up_to_own = number[None, 1:] <= number[:, None]
    added = torch.cat((unread[:, None].expand(-1, rows, -1), up_to_own.expand(requests, -1, -1)), dim=2)
    tokens = torch.cat((before.tokens.clamp(min=0), ids[:, 1:]), dim=1)[:, None].expand(-1, rows, -1)
    return counts[:, None].repeat(1, rows, 1).scatter_add_(2, tokens, 2 * added.int()).flatten(0, 1)


def _of_prompt(request: Request, vocab: int) -> torch.Tensor:
    """int32 ``[vocab]``: 1 for each token of the prompt."""
    return torch.zeros(vocab, dtype=torch.int32).index_fill_(0, torch.from_numpy(np.asarray(request.prompt)).long(), 1)


def add_occurrences(counts: torch.Tensor, where: list[tuple[int, int]], sampled: torch.Tensor | None = None) -> None:
    """Counts tokens, given as (row of ``counts``, token or placeholder); a row may have a token several times."""
    if not where:
        return
    rows, tokens = torch.tensor(where, dtype=torch.int64).unbind(1)
    at = upload(rows * counts.shape[1], counts.device) + known_ids(tokens, sampled, counts.device)
    counts.view(-1).scatter_add_(0, at, torch.full_like(at, 2, dtype=torch.int32))


def indices(values: Sequence[object], like: torch.Tensor) -> torch.Tensor:
    """int64 tensor on the device of ``like``."""
    return upload(torch.tensor(values, dtype=torch.int64), like.device)
