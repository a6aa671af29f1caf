"""What the chain needs for the rows of an eager step: biases, forbidden tokens, counts for penalties, parameters.

Definitions and order are vLLM's. With ``x`` a token's logit: ``allowed_token_ids``, ``bad_words`` and ``min_tokens``
set it to -inf; ``logit_bias`` is added; if prompt or output contain the token, ``x`` becomes ``x / r`` if it is
positive and ``x · r`` otherwise (r: ``repetition_penalty``); then ``frequency_penalty · c`` is subtracted, where c
counts the token in the output, and ``presence_penalty`` if c > 0. ``bad_words`` apply to the output only, too.

A request may have several rows in a step, for drafts that are not accepted yet; ``Request.tokens`` returns the drafts
at their positions. All rows of a step share each launch.

For penalties, the tokens that the host knows are counted once, in a table on the device. What it does not know yet, and
drafts, are counted for single rows of logits without waiting: by :func:`add_occurrences` in eager steps, by
:func:`with_tokens` and :func:`with_drafts` in steps that are one graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from weakref import WeakKeyDictionary

import numpy as np
import torch

from dsa_engine.engine.requests.request import NEVER, Request
from dsa_engine.engine.sampling.chain import Inputs, Parameters
from dsa_engine.engine.sampling.thinking import put_ends, thoughts_of
from dsa_engine.engine.steps.batch import known_ids
from dsa_engine.engine.steps.plan import Wanted
from dsa_engine.kernels.runtime.integers import next_power_of_2
from dsa_engine.kernels.runtime.transfer import upload
from dsa_engine.sampling_params import DRAWS, HAS_BUDGET, PENALISES


class LogitsProcessors:
    """``eos_token_ids``: the model's end-of-sequence tokens, which ``min_tokens`` forbids."""

    def __init__(self, eos_token_ids: Sequence[int]):
        self._eos_token_ids = eos_token_ids
        self._biases = PerRequestTable(torch.float32)  # constant terms of a request; -inf forbids
        self.counts = PenaltyCounts()

    def inputs(self, wanted: Sequence[Wanted], logits: torch.Tensor, sampled: torch.Tensor | None) -> Inputs:
        """The inputs of the chain, without masks and drafts, for ``logits``, float32 ``[n, vocab]``; those of a request
        are in order of position. ``sampled``: tokens of the step before, if they have not been read
        (``batch.known_ids``)."""
        of_each, vocab, asks = [request.asks for request, *_ in wanted], logits.shape[1], 0
        for asked in of_each:
            asks |= asked
        inputs = Inputs(asks, edit=self._edit(wanted, logits, sampled))
        if asks & HAS_BUDGET:
            inputs = inputs._replace(put_ends=_ends(wanted, logits, sampled))
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
        slots = self.counts.slots(known, logits)
        counts = self.counts.rows.table[indices([slots[request] for request, *_ in wanted], logits)]
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
    """Whether :func:`_bias` has a value."""
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


def _ends(
    wanted: Sequence[Wanted], logits: torch.Tensor, sampled: torch.Tensor | None
) -> Callable[[torch.Tensor], torch.Tensor]:
    """What puts in the ends of thoughts, see :func:`.put_ends`."""
    positions, known = [one.position for one in wanted], [one.request.num_known_tokens for one in wanted]
    following = [[*one.request.tokens(n, max(0, one.position - n))] for one, n in zip(wanted, known, strict=True)]
    longest = max(map(len, following))
    filled = torch.tensor([of + [NEVER] * (longest - len(of)) for of in following], dtype=torch.int64)
    tokens = known_ids(filled.view(len(wanted), longest), sampled, logits.device)
    at = indices(known, logits)[:, None] + torch.arange(longest, device=logits.device)
    thoughts = upload(thoughts_of([one.request for one in wanted]), logits.device)
    return lambda chosen: put_ends(chosen, indices(positions, logits), thoughts, tokens, at)


class PenaltyCounts:
    """Counts of the tokens that the host knows: 2 · occurrences in the output, + 1 if the prompt has the token.
    ``rows``: int32 ``[vocab]`` for each request."""

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


def with_tokens(counts: torch.Tensor, tokens: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
    """Counts, int32 ``[requests, vocab]``, with those of ``tokens``, int64 ``[requests, m]``, for which the bool
    ``counted`` of the same shape is set; others may be negative."""
    return counts.scatter_add(1, tokens.clamp(min=0), 2 * counted.int())


def with_drafts(counts: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Counts for each row of a step, int32 ``[requests · rows, vocab]``, from those of the tokens before its drafts,
    ``[requests, vocab]``. ``ids``: int64 ``[requests, rows]``, token of each row; a row counts its own draft and those
    before it."""
    requests, rows = ids.shape
    number = torch.arange(rows, device=ids.device)
    up_to_own = 2 * (number[None, 1:] <= number[:, None]).int().expand(requests, -1, -1)
    drafts = ids[:, None, 1:].expand(-1, rows, -1)
    return counts[:, None].repeat(1, rows, 1).scatter_add_(2, drafts, up_to_own).flatten(0, 1)


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
    """int64, on the device of ``like``."""
    return upload(torch.tensor(values, dtype=torch.int64), like.device)
