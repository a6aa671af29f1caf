"""What the chain needs for the rows of an eager step: biases, forbidden tokens, counts for penalties, parameters.

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

from collections.abc import Callable, Sequence

import torch

from dsa_engine.engine.requests.request import Request
from dsa_engine.engine.sampling.chain import Inputs, Parameters
from dsa_engine.engine.sampling.penalties import PenaltyCounts, PerRequestTable, add_occurrences, indices
from dsa_engine.engine.steps.batch import known_ids
from dsa_engine.engine.steps.plan import Wanted
from dsa_engine.kernels.runtime.transfer import upload
from dsa_engine.sampling_params import DRAWS, PENALISES


class LogitsProcessors:
    """Reads what the rows of requests ask for.

    Args:
        eos_token_ids: the model's end-of-sequence tokens, which ``min_tokens`` forbids.
    """

    def __init__(self, eos_token_ids: Sequence[int]):
        self._eos_token_ids = eos_token_ids
        self._biases = PerRequestTable(torch.float32)  # constant terms of a request; -inf forbids
        self._counts = PenaltyCounts()

    def inputs(self, wanted: Sequence[Wanted], logits: torch.Tensor, sampled: torch.Tensor | None) -> Inputs:
        """The inputs of the chain, without masks and drafts.

        Args:
            wanted: one for each row of logits; those of a request are in order of position.
            logits: float32 ``[n, vocab]``.
            sampled: tokens of the step before, if they have not been read (``batch.known_ids``).
        """
        of_each, vocab, asks = [request.asks for request, *_ in wanted], logits.shape[1], 0
        for asked in of_each:
            asks |= asked
        inputs = Inputs(asks, edit=self._edit(wanted, logits, sampled))
        if not asks & (DRAWS | PENALISES):
            return inputs
        params, keys = zip(*((request.params, request.draw_key) for request, *_ in wanted), strict=True)
        inputs = inputs._replace(table=upload(Parameters.pack(params, keys, vocab), logits.device))
        if asks & DRAWS:
            inputs = inputs._replace(
                top_k=max((p.num_best for p in params if p.num_best < vocab), default=0),
                positions=indices([one.position for one in wanted], logits),
                drawn=_rows_that_ask(DRAWS, of_each, logits),
            )
        if asks & PENALISES:
            of_rows = [one for one, asked in zip(wanted, of_each, strict=True) if asked & PENALISES]
            inputs = inputs._replace(
                counts=lambda: self._counted(of_rows, logits, sampled),
                with_penalties=_rows_that_ask(PENALISES, of_each, logits),
            )
        return inputs

    def _edit(
        self, wanted: Sequence[Wanted], logits: torch.Tensor, sampled: torch.Tensor | None
    ) -> Callable[[torch.Tensor], None] | None:
        """Changes logits by biases and forbidden tokens; None: nothing is to change."""
        biased = [i for i, (request, *_) in enumerate(wanted) if is_biased(request)]
        forbidden, perhaps, conditions = self._forbidden(wanted, logits.shape[1])
        if not (biased or forbidden or perhaps):
            return None

        def edit(logits: torch.Tensor) -> None:
            if biased:
                requests = [wanted[i].request for i in biased]
                slots = self._biases.slots(requests, lambda request: _bias(request, logits.shape[1]), logits)
                biases = self._biases.table[indices([slots[request] for request in requests], logits)]
                logits[indices(biased, logits)] += biases
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

        return edit

    def _forbidden(
        self, wanted: Sequence[Wanted], vocab: int
    ) -> tuple[list[tuple[int, int]], list[tuple[int, int]], list[list[tuple[int, int]]]]:
        """Tokens that ``min_tokens`` and ``bad_words`` of several tokens forbid, as (row, token); those that are
        forbidden if conditions are met; and the conditions of each, as (placeholder, the token that it must be)."""
        forbidden: list[tuple[int, int]] = []
        perhaps: list[tuple[int, int]] = []
        conditions: list[list[tuple[int, int]]] = []
        for i, (request, position, _) in enumerate(wanted):
            length = position - len(request.prompt)
            if length < request.params.min_tokens:
                forbidden += [(i, t) for t in (*self._eos_token_ids, *(request.params.stop_token_ids or ()))]
            if not request.bad_words:
                continue
            longest = min(length, max(map(len, request.bad_words)) - 1)
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
        return [(row, token) for row, token in forbidden if token < vocab], perhaps, conditions

    def _counted(self, wanted: Sequence[Wanted], logits: torch.Tensor, sampled: torch.Tensor | None) -> torch.Tensor:
        """int32 ``[len(wanted), vocab]``: counts for :func:`.penalised`, of the tokens before each row's position."""
        known = dict[Request, int]()
        for request, position, _ in wanted:
            known.setdefault(request, min(position, request.num_known_tokens))
        slots = self._counts.slots(known, logits)
        counts = self._counts.rows.table[indices([slots[request] for request, *_ in wanted], logits)]
        unknown = [
            (row, token)
            for row, (request, position, _) in enumerate(wanted)
            for token in request.tokens(known[request], position - known[request])
        ]
        add_occurrences(counts, unknown, sampled)
        return counts


def _rows_that_ask(what: int, asks: Sequence[int], like: torch.Tensor) -> torch.Tensor | None:
    """int64 on the device of ``like``: the rows that ask for this; None: all of them."""
    rows = [row for row, asked in enumerate(asks) if asked & what]
    return None if len(rows) == len(asks) else indices(rows, like)


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
