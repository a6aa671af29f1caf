"""Changes to a request's logits before a token is chosen: biases, forbidden tokens, penalties.

Definitions and order are vLLM's. With ``x`` a token's logit: ``allowed_token_ids``, ``bad_words`` and ``min_tokens``
set it to -inf; ``logit_bias`` is added; if prompt or output contain the token, ``x`` becomes ``x / r`` if it is
positive and ``x · r`` otherwise (r: ``repetition_penalty``); then ``frequency_penalty · c`` is subtracted, where c
counts the token in the output, and ``presence_penalty`` if c > 0. ``bad_words`` apply to the output only, too.

A row of logits depends on the tokens of its request before its position, and on no others. So a request may have
several rows in a step, for drafts that are not accepted yet; ``Request.tokens`` returns the drafts at their positions.
Tokens before the first of these rows are certain, and are counted once in a table on the device. Drafts between it and
a later row are counted for that row alone. Placeholders, which only the device knows, are counted on the device
without waiting. All rows of a step share each launch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from dsa_engine.engine.requests.request import Request
from dsa_engine.engine.steps.batch import known_ids
from dsa_engine.engine.steps.plan import Wanted
from dsa_engine.kernels.runtime.integers import next_power_of_2
from dsa_engine.kernels.runtime.transfer import upload
from dsa_engine.sampling_params import SamplingParams


class LogitsProcessors:
    """Changes the logits of requests as their parameters say.

    Args:
        eos_token_ids: the model's end-of-sequence tokens, which ``min_tokens`` forbids.
    """

    def __init__(self, eos_token_ids: Sequence[int]):
        self._eos_token_ids = eos_token_ids
        self._biases = PerRequestTable(torch.float32)  # constant terms of a request; -inf forbids
        self._counts = PerRequestTable(torch.int32)  # 2 · occurrences in the output, + 1 if the prompt has the token
        self._counted: dict[Request, int] = {}  # the tokens before this position are counted

    def apply(self, logits: torch.Tensor, wanted: Sequence[Wanted], sampled: torch.Tensor | None) -> None:
        """Changes ``logits`` (float32 ``[len(wanted), vocab]``).

        Args:
            logits: a row for each of ``wanted``; the rows of a request are in order of position.
            sampled: tokens of the step before, if they have not been read (``batch.known_ids``).
        """
        self._add_biases(logits, wanted)
        self._forbid(logits, wanted, sampled)
        self._penalise(logits, wanted, sampled)

    def _add_biases(self, logits: torch.Tensor, wanted: Sequence[Wanted]) -> None:
        rows = [i for i, (request, *_) in enumerate(wanted) if is_biased(request)]
        if not rows:
            return
        requests = [wanted[i].request for i in rows]
        slots = self._biases.slots(requests, lambda request: _bias(request, logits.shape[1]), logits)
        biases = self._biases.table[_indices([slots[request] for request in requests], logits)]
        logits[_indices(rows, logits)] += biases

    def _forbid(self, logits: torch.Tensor, wanted: Sequence[Wanted], sampled: torch.Tensor | None) -> None:
        """Forbids tokens for ``min_tokens``, and for ``bad_words`` of several tokens."""
        forbidden: list[tuple[int, int]] = []  # (row, token)
        perhaps: list[tuple[int, int]] = []  # (row, token) that is forbidden if its conditions are met
        conditions: list[list[tuple[int, int]]] = []  # for each: (placeholder, the token that it must be)
        for i, (request, position, _) in enumerate(wanted):
            length = position - len(request.prompt)
            if length < request.params.min_tokens:
                forbidden += [(i, t) for t in (*self._eos_token_ids, *(request.params.stop_token_ids or ()))]
            for *begin, last in request.bad_words:
                if not 0 < len(begin) <= length:
                    continue
                pairs = list(zip(request.tokens(position - len(begin), len(begin)), begin, strict=True))
                unknown = [(token, of_word) for token, of_word in pairs if token < 0]
                if any(token != of_word for token, of_word in pairs if token >= 0):
                    continue
                if unknown:
                    perhaps.append((i, last))
                    conditions.append(unknown)
                else:
                    forbidden.append((i, last))
        forbidden = [(row, token) for row, token in forbidden if token < logits.shape[1]]
        never = logits.new_full((), float("-inf"))  # made on the device: a copy from the host would wait
        if forbidden:
            rows, ids = _indices(forbidden, logits).unbind(1)
            logits[rows, ids] = never
        if perhaps:
            rows, ids = _indices(perhaps, logits).unbind(1)
            longest = max(map(len, conditions))
            filled = torch.tensor([of + of[-1:] * (longest - len(of)) for of in conditions], dtype=torch.int64)
            placeholders, expected = filled.unbind(2)
            met = known_ids(placeholders, sampled, logits.device) == upload(expected, logits.device)
            added = torch.where(met.all(dim=1), never, torch.zeros_like(never))
            logits.index_put_((rows, ids), added, accumulate=True)

    def _penalise(self, logits: torch.Tensor, wanted: Sequence[Wanted], sampled: torch.Tensor | None) -> None:
        rows = [i for i, (request, *_) in enumerate(wanted) if request.params.penalises]
        if not rows:
            return
        counts = self._count([wanted[i] for i in rows], logits, sampled)
        at = _indices(rows, logits)
        penalties = upload(penalties_of([wanted[i].request.params for i in rows]).float(), logits.device)
        logits[at] = penalised(logits[at], counts, penalties)

    def _count(self, wanted: list[Wanted], logits: torch.Tensor, sampled: torch.Tensor | None) -> torch.Tensor:
        """int32 ``[len(wanted), vocab]``: 2 · occurrences in the output, + 1 if the prompt has the token."""
        certain: dict[Request, int] = {}  # tokens before this position are no drafts
        for request, position, _ in wanted:
            certain.setdefault(request, position)
        for request in [r for r in self._counted if r.finish_reason is not None]:
            del self._counted[request]
        for request, end in certain.items():
            if self._counted.get(request, len(request.prompt)) > end:
                self._counts.forget(request)
                del self._counted[request]
        vocab = logits.shape[1]
        slots = self._counts.slots(list(certain), lambda request: of_prompt(request, vocab), logits)
        table, more = self._counts.table, []
        for request, end in certain.items():
            start = self._counted.get(request, len(request.prompt))
            more += [(slots[request], token) for token in request.tokens(start, end - start)]
        _add_occurrences(table, more, sampled)
        self._counted.update(certain)
        counts = table[_indices([slots[request] for request, *_ in wanted], logits)]
        drafts = [
            (row, token)
            for row, (request, position, _) in enumerate(wanted)
            for token in request.tokens(certain[request], position - certain[request])
        ]
        _add_occurrences(counts, drafts, sampled)
        return counts


def penalties_of(params: Sequence[SamplingParams]) -> torch.Tensor:
    """Repetition, frequency and presence penalties, float64 ``[3, n]`` on the host."""
    columns = [(p.repetition_penalty, p.frequency_penalty, p.presence_penalty) for p in params]
    return torch.tensor(columns, dtype=torch.float64).view(-1, 3).T


def penalised(logits: torch.Tensor, counts: torch.Tensor, penalties: torch.Tensor) -> torch.Tensor:
    """Logits after the penalties for repetition.

    Args:
        logits: float32 ``[n, vocab]``.
        counts: int32 ``[n, vocab]``: 2 · occurrences in the output, + 1 if the prompt has the token.
        penalties: float32 ``[3, n]``, see :func:`penalties_of`.
    """
    repetition, frequency, presence = penalties[..., None]
    factor = torch.where(counts > 0, repetition, torch.ones_like(repetition))
    in_output = counts >> 1
    return (
        torch.where(logits > 0, logits / factor, logits * factor) - frequency * in_output - presence * (in_output > 0)
    )


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
            self.forget(request)
        new = [request for request in dict.fromkeys(requests) if request not in self._slots]
        if new:
            used = set(self._slots.values())
            free = [slot for slot in range(len(used) + len(new)) if slot not in used][: len(new)]
            if (rows := max(free) + 1) > len(self.table):
                grown = torch.zeros(next_power_of_2(rows), like.shape[1], dtype=self.table.dtype, device=like.device)
                if len(self.table):
                    grown[: len(self.table)] = self.table
                self.table = grown
            self.table[_indices(free, like)] = upload(torch.stack([make(request) for request in new]), like.device)
            self._slots.update(zip(new, free, strict=True))
        return self._slots

    def forget(self, request: Request) -> None:
        self._slots.pop(request, None)


def is_biased(request: Request) -> bool:
    """Whether the same values are added to a request's logits in every step."""
    params = request.params
    return bool(params.allowed_token_ids or params.logit_bias or any(len(word) == 1 for word in request.bad_words))


def _bias(request: Request, vocab: int) -> torch.Tensor:
    """float32 ``[vocab]``: the values added to a request's logits in every step."""
    params = request.params
    bias = torch.zeros(vocab)
    if params.allowed_token_ids is not None:
        bias.fill_(float("-inf"))
        bias[torch.tensor(params.allowed_token_ids)] = 0.0
    words = [word[0] for word in request.bad_words if len(word) == 1]
    bias[torch.tensor(words, dtype=torch.int64)] = float("-inf")
    for token, added in (params.logit_bias or {}).items():
        bias[token] += added
    return bias


def of_prompt(request: Request, vocab: int) -> torch.Tensor:
    """int32 ``[vocab]``: 1 for each token of the prompt."""
    return torch.zeros(vocab, dtype=torch.int32).index_fill_(0, torch.from_numpy(np.asarray(request.prompt)).long(), 1)


def _add_occurrences(counts: torch.Tensor, where: list[tuple[int, int]], sampled: torch.Tensor | None) -> None:
    """Counts tokens, given as (row of ``counts``, token or placeholder); a row may have a token several times."""
    if not where:
        return
    rows, tokens = torch.tensor(where, dtype=torch.int64).unbind(1)
    at = upload(rows * counts.shape[1], counts.device) + known_ids(tokens, sampled, counts.device)
    counts.view(-1).scatter_add_(0, at, torch.full_like(at, 2, dtype=torch.int32))


def _indices(values: Sequence[object], like: torch.Tensor) -> torch.Tensor:
    """int64 tensor on the device of ``like``."""
    return upload(torch.tensor(values, dtype=torch.int64), like.device)
