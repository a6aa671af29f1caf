"""From a step's logits to everybody's next tokens. They stay on the device until somebody reads them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from dsa_engine.engine.batch import StepPlan
from dsa_engine.engine.request import Request
from dsa_engine.engine.sampling import log_probabilities, sample
from dsa_engine.kernels.transfer import download, upload
from dsa_engine.model.config import ModelConfig
from dsa_engine.parallel import Mesh

# Codes in place of a token, where a request's sampling went wrong.
_NOT_FINITE, _NOTHING_LEFT = -1, -2
_ERRORS = {
    _NOT_FINITE: "the model's logits for its next token are not finite (inf or nan)",
    _NOTHING_LEFT: "no token is left to sample: min_tokens with its stop_token_ids forbids every one",
}


class Sampled(NamedTuple):
    """What a step has sampled for one request: a token, or the error that this request ends with."""

    request: Request
    token: int
    logprobs: dict[int, float] | None  # by token id, as in RequestOutput.logprobs; None where they were not asked for
    error: str | None


@dataclass(frozen=True)
class Samples:
    """What a step samples, the same on every rank, on its way to the host."""

    places: dict[Request, int]  # where each request's token lies in ``tokens``
    tokens: torch.Tensor  # int64 [ranks · most samples of a rank], on the device; codes of errors in place of some
    _codes: Callable[[], list[Any]]
    _logprobs: Callable[[], list[Any]] | None

    def read(self) -> list[Sampled]:
        """Waits until the device has sampled."""
        codes = self._codes()
        logprobs = self._logprobs() if self._logprobs else []
        sampled = []
        for request, place in self.places.items():
            token, asked, found = codes[place], request.params.logprobs, None
            if token >= 0 and asked is not None:
                found = _ranked(token, logprobs[place], asked)
            sampled.append(Sampled(request, token, found, _ERRORS.get(token)))
        return sampled


class Sampler:
    """Chooses tokens and exchanges them between the ranks.

    Args:
        config, mesh: of the engine.
        seed: of requests without a seed of their own.
    """

    def __init__(self, config: ModelConfig, mesh: Mesh, seed: int):
        self._config = config
        self._mesh = mesh
        self._seed = seed

    def sample(self, plan: StepPlan, logits: torch.Tensor) -> Samples:
        """Chooses the tokens of this rank's rows ``logits [n, vocab]``, float32, which it changes, and gathers
        everybody's; nothing waits for the device."""
        most = max(len(p.logits_rows) for p in plan.ranks)
        places = {s: rank * most + i for rank, p in enumerate(plan.ranks) for i, (_, s) in enumerate(p.logits_rows)}
        if not places:
            return Samples({}, torch.empty(0, dtype=torch.int64, device=logits.device), list, None)
        mine = [request for _, request in plan.ranks[self._mesh.rank].logits_rows]
        asked = [s.params.logprobs for s in places if s.params.logprobs is not None]
        unmodified = logits.clone() if asked else logits
        tokens = self._choose(mine, logits)
        spare = most - len(mine)
        everybodys = self._mesh.world.all_gather(F.pad(tokens, (0, spare)))
        logprobs = None
        if asked:
            best = min(max(asked), self._config.vocab_size)
            table = F.pad(log_probabilities(unmodified, tokens.clamp(min=0), best), (0, 0, 0, spare))
            logprobs = download(self._mesh.world.all_gather(table))
        return Samples(places, everybodys, download(everybodys), logprobs)

    def _choose(self, requests: list[Request], logits: torch.Tensor) -> torch.Tensor:
        """A token for every row, int64 ``[n]``, or the code of an error.

        What one request's parameters or logits make impossible is that request's error, and nobody else's.
        """
        forbidden = [
            (i, token)
            for i, s in enumerate(requests)
            if s.generated < s.params.min_tokens
            for token in (*self._config.eos_token_ids, *(s.params.stop_token_ids or ()))
            if token < logits.shape[1]
        ]
        if forbidden:
            rows, ends = upload(torch.tensor(forbidden, dtype=torch.int64).T.contiguous(), logits.device)
            logits[rows, ends] = logits.new_full((), float("-inf"))  # a number would be copied, and waited for
        highest, tokens = logits.max(dim=-1)  # the choice of all greedy requests; NaN counts as the highest
        drawn = [i for i, s in enumerate(requests) if s.params.temperature > 0]
        if drawn:
            rows = upload(torch.tensor(drawn, dtype=torch.int64), logits.device)
            them = [requests[i] for i in drawn]
            seeds = [_mixed(self._seed, s.id) if s.params.seed is None else s.params.seed for s in them]
            tokens[rows] = sample(logits[rows], [s.params for s in them], seeds, [len(s) for s in them])
        return tokens.where(highest.isfinite(), _NOT_FINITE).where(highest != float("-inf"), _NOTHING_LEFT)


def _mixed(seed: int, number: int) -> int:
    """A seed for the request of this number: neighbouring seeds and numbers have nothing in common."""
    return int.from_bytes(blake2b(f"{seed} {number}".encode(), digest_size=8).digest(), "big")


def _ranked(token: int, row: list[float], count: int) -> dict[int, float]:
    """A row of :func:`log_probabilities` by token id: the ``count`` most likely tokens, and the sampled one."""
    most = len(row) // 2
    found = dict(zip(map(int, row[1 : 1 + most][:count]), row[1 + most :], strict=False))
    return found | {token: row[0]}
