"""From a step's logits to everybody's next tokens. They stay on the device until somebody reads them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from dsa_engine.engine.logit_terms import LogitTerms, Wanted, is_biased
from dsa_engine.engine.request import LastRows, Request, SampledToken
from dsa_engine.engine.sample_logits import log_probabilities, ranked, sample
from dsa_engine.engine.speculation.acceptance import RelaxedAcceptance
from dsa_engine.engine.speculation.result import DraftResult, Outcome
from dsa_engine.engine.step_plan import RankPlan, StepPlan
from dsa_engine.kernels.transfer import download, upload
from dsa_engine.model.config import ModelConfig
from dsa_engine.outputs import Logprobs
from dsa_engine.parallel import Mesh

# Codes in place of a token, where a request's sampling went wrong.
NOT_FINITE, _NOTHING_LEFT = -1, -2
_ERRORS = {
    NOT_FINITE: "the model's logits for its next token are not finite (inf or nan)",
    _NOTHING_LEFT: "no token is left to sample: allowed_token_ids, bad_words, logit_bias, and min_tokens with its "
    "stop_token_ids, forbid every one",
}


class Sampled(NamedTuple):
    """What a step has sampled for one request: a token from each of its rows of logits, in order of position; with
    drafts, up to the first that was not accepted, and the token in its place."""

    request: Request
    tokens: list[SampledToken]
    verified: DraftResult | None = None  # None where nothing is drafted


@dataclass(frozen=True)
class Samples:
    """What a step samples, the same on every rank, on its way to the host."""

    indices: dict[Request, range]  # where each request's tokens lie in ``tokens``
    tokens: torch.Tensor  # int64 [n], on the device, the same on all ranks; codes of errors in place of some
    _codes: Callable[[], list[Any]]
    _logprobs: Callable[[], list[Any]] | None
    prompt_logprobs: Mapping[Request, Mapping[int, Logprobs]] = field(default_factory=dict)  # by position
    verified: Callable[[], list[DraftResult]] | None = None  # of each request; None: nothing is drafted
    outcome: Outcome | None = None  # from which the next step may follow
    last_rows: Mapping[Request, LastRows] = field(default_factory=dict)  # that this rank's requests are to keep

    def read(self) -> list[Sampled]:
        """Waits until the device has sampled."""
        codes = self._codes()
        logprobs = self._logprobs() if self._logprobs else [None] * len(codes)
        sampled = [
            Sampled(request, [_sampled(codes[i], logprobs[i], request.params.logprobs) for i in indices])
            for request, indices in self.indices.items()
        ]
        if self.verified is None:
            return sampled
        return [
            Sampled(one.request, one.tokens[: found.accepted + 1], found)
            for one, found in zip(sampled, self.verified(), strict=True)
        ]


class Sampler:
    """Chooses tokens and exchanges them between the ranks.

    Args:
        config, mesh: of the engine.
        seed: of requests without a seed of their own.
        relaxed: puts likely drafts in the place of chosen tokens.
    """

    def __init__(self, config: ModelConfig, mesh: Mesh, seed: int, relaxed: RelaxedAcceptance | None = None):
        self._config = config
        self._mesh = mesh
        self._seed = seed
        self._relaxed = relaxed
        self._terms = LogitTerms(config.eos_token_ids)

    def sample(self, plan: StepPlan, logits: torch.Tensor, sampled: torch.Tensor | None = None) -> Samples:
        """Chooses the tokens of this rank's rows and gathers everybody's; nothing waits for the device.

        Args:
            plan: of the step; each request's rows of logits lie on one rank.
            logits: float32 ``[logits_rows of this rank, vocab]``; it is changed.
            sampled: ``Samples.tokens`` of the step before, where they have not been read.
        """
        most = max(len(rank_plan.logits_rows) for rank_plan in plan.ranks)
        indices = _indices(plan, most)
        if not indices:
            return Samples({}, torch.empty(0, dtype=torch.int64, device=logits.device), list, None)
        asked = [request.params.logprobs for request in indices if request.params.logprobs is not None]
        unmodified = logits.clone() if asked else logits
        wanted = _wanted(plan.ranks[self._mesh.rank])
        total = logits.sum(dim=-1)  # finite where all of a row are, also those that the terms forbid
        self._terms.apply(logits, wanted, sampled)
        tokens = self._choose(wanted, logits)
        if self._relaxed is not None:
            tokens = self._relaxed(wanted, logits, tokens)
        tokens = tokens.where(total.isfinite(), NOT_FINITE)
        spare = most - len(tokens)
        everybodys = self._mesh.world.all_gather(F.pad(tokens, (0, spare)))
        logprobs = None
        if asked:
            best = min(max(asked), self._config.vocab_size)
            table = F.pad(log_probabilities(unmodified, tokens.clamp(min=0), best), (0, 0, 0, spare))
            logprobs = download(self._mesh.world.all_gather(table))
        return Samples(indices, everybodys, download(everybodys), logprobs)

    def _choose(self, wanted: list[Wanted], logits: torch.Tensor) -> torch.Tensor:
        """A token for every row, int64 ``[n]``, or the code of an error.

        What one request's parameters or logits make impossible is that request's error, and nobody else's.
        """
        highest, tokens = _highest(logits)  # the choice of all greedy requests
        drawn = [i for i, (request, _) in enumerate(wanted) if request.params.temperature > 0]
        if drawn:
            rows = upload(torch.tensor(drawn, dtype=torch.int64), logits.device)
            requests, positions = zip(*(wanted[i] for i in drawn), strict=True)
            seeds = [seed_of(request, self._seed) for request in requests]
            tokens[rows] = sample(logits[rows], [r.params for r in requests], seeds, positions)
        return tokens.where(highest != float("-inf"), _NOTHING_LEFT)


def _highest(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The highest number of each row, and where it stands, ``[n]`` each."""
    if logits.device.type != "cpu":
        highest, places = logits.max(dim=-1)
        return highest, places
    places = logits.argmax(dim=-1)  # on a CPU max() lets all threads meet, for however few rows
    return logits.gather(1, places[:, None])[:, 0], places


def _indices(plan: StepPlan, most: int) -> dict[Request, range]:
    """Where each request's tokens lie among everybody's, ``most`` for each rank."""
    indices: dict[Request, range] = {}
    for rank, rank_plan in enumerate(plan.ranks):
        for index, (_, request) in enumerate(rank_plan.logits_rows, rank * most):
            rows = indices.get(request, range(index, index))
            if rows.stop != index:
                raise ValueError("a request's rows of logits must lie side by side on one rank to be sampled from")
            indices[request] = range(rows.start, index + 1)
    return indices


def _wanted(rank_plan: RankPlan) -> list[Wanted]:
    """For every row of logits, whose token is drawn, and at which position: the one behind the row's own."""
    position = {chunk.request: chunk.end - chunk.num_logits for chunk in rank_plan.chunks}
    wanted = []
    for _, request in rank_plan.logits_rows:
        position[request] += 1
        wanted.append(Wanted(request, position[request]))
    return wanted


def _sampled(code: int, logprobs: list[float] | None, asked: int | None) -> SampledToken:
    if code < 0:
        return SampledToken(code, error=_ERRORS[code])
    return SampledToken(code, None if asked is None or logprobs is None else ranked(code, logprobs, asked))


def needs_host(request: Request) -> bool:
    """Whether its next tokens ask for what only a :class:`Sampler` does: on the host, in each step."""
    params = request.params
    asks = params.logprobs is not None or len(request.output) < params.min_tokens
    return asks or is_biased(request) or bool(request.bad_words)


def seed_of(request: Request, seed: int) -> int:
    """A request's own seed, or one from the engine's and its number."""
    return _mixed(seed, request.id) if request.params.seed is None else request.params.seed


def _mixed(seed: int, number: int) -> int:
    """A seed for the request of this number: neighbouring seeds and numbers have nothing in common."""
    return int.from_bytes(blake2b(f"{seed} {number}".encode(), digest_size=8).digest(), "big")
