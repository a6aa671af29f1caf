"""Changes to a request's logits before a token is chosen: biases, forbidden tokens, penalties.

Definitions and order are vLLM's. With ``x`` a token's logit: ``allowed_token_ids``, ``bad_words`` and ``min_tokens``
set it to -inf; ``logit_bias`` is added; if prompt or output contain the token, ``x`` becomes ``x / r`` if it is
positive and ``x · r`` otherwise (r: ``repetition_penalty``); then ``frequency_penalty · c`` is subtracted, where c
counts the token in the output, and ``presence_penalty`` if c > 0. ``bad_words`` apply to the output only, too.

A row of logits depends on the tokens of its request before its position, and on no others. So a request may have
several rows in a step, for drafts that are not accepted yet; ``Request.tokens`` returns the drafts at their positions.
Placeholders, which only the device knows, are counted on the device without waiting. All rows of a step share each
launch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dsa_engine.engine.requests.request import Request
from dsa_engine.engine.sampling.penalties import (
    PenaltyCounts,
    PerRequestTable,
    add_occurrences,
    indices,
    penalised,
    penalties_of,
)
from dsa_engine.engine.steps.batch import known_ids
from dsa_engine.engine.steps.plan import Wanted
from dsa_engine.kernels.runtime.transfer import upload


class LogitsProcessors:
    """Changes the logits of requests as their parameters say.

    Args:
        eos_token_ids: the model's end-of-sequence tokens, which ``min_tokens`` forbids.
    """

    def __init__(self, eos_token_ids: Sequence[int]):
        self._eos_token_ids = eos_token_ids
        self._biases = PerRequestTable(torch.float32)  # constant terms of a request; -inf forbids
        self._counts = PenaltyCounts()

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
        biases = self._biases.table[indices([slots[request] for request in requests], logits)]
        logits[indices(rows, logits)] += biases

    def _forbid(self, logits: torch.Tensor, wanted: Sequence[Wanted], sampled: torch.Tensor | None) -> None:
        """Forbids tokens for ``min_tokens``, and for ``bad_words`` of several tokens."""
        forbidden: list[tuple[int, int]] = []  # (row, token)
        perhaps: list[tuple[int, int]] = []  # (row, token) that is forbidden if its conditions are met
        conditions: list[list[tuple[int, int]]] = []  # for each: (placeholder, the token that it must be)
        for i, (request, position, _) in enumerate(wanted):
            length = position - len(request.prompt)
            if length < request.params.min_tokens:
                forbidden += [(i, t) for t in (*self._eos_token_ids, *(request.params.stop_token_ids or ()))]
            longest = min(length, max(map(len, request.bad_words), default=1) - 1)
            recent = request.tokens(position - longest, longest)
            for word in request.bad_words:
                size, last = len(word) - 1, word[-1]
                if not 0 < size <= length or 0 <= recent[-1] != word[-2]:  # nearly always: another token is the last
                    continue
                pairs = list(zip(recent[-size:], word[:-1], strict=True))
                unknown = [(token, of_word) for token, of_word in pairs if token < 0]
                if any(token != of_word for token, of_word in pairs if token >= 0):
                    continue
                if unknown:
                    perhaps.append((i, last))
                    conditions.append(unknown)
                else:
                    forbidden.append((i, last))
        forbidden = [(row, token) for row, token in forbidden if token < logits.shape[1]]
        if not forbidden and not perhaps:
            return
        never = logits.new_full((), float("-inf"))  # made on the device: a copy from the host would wait
        if forbidden:
            rows, ids = indices(forbidden, logits).unbind(1)
            logits[rows, ids] = never
        if perhaps:
            rows, ids = indices(perhaps, logits).unbind(1)
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
        requests, known = [wanted[i].request for i in rows], dict[Request, int]()
        for i in rows:
            request, position, _ = wanted[i]
            known.setdefault(request, min(position, request.num_known_tokens))
        slots = self._counts.slots(known, logits)
        counts = self._counts.rows.table[indices([slots[request] for request in requests], logits)]
        unknown = [
            (row, token)
            for row, (request, position, _) in enumerate(wanted[i] for i in rows)
            for token in request.tokens(known[request], position - known[request])
        ]
        add_occurrences(counts, unknown, sampled)
        at = indices(rows, logits)
        penalties = upload(penalties_of([request.params for request in requests]).float(), logits.device)
        logits[at] = penalised(logits[at], counts, penalties)


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
