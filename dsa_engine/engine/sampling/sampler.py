"""From a step's logits to everybody's next tokens. They stay on the device until somebody reads them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import blake2b

import torch
import torch.nn.functional as F

from dsa_engine.config.model import ModelConfig
from dsa_engine.engine.requests.request import Request
from dsa_engine.engine.sampling.draw import log_probabilities, sample
from dsa_engine.engine.sampling.processors import LogitsProcessors, Wanted, is_biased
from dsa_engine.engine.sampling.result import NOT_FINITE, NOTHING_LEFT, StepResult
from dsa_engine.engine.steps.plan import RankPlan, StepPlan
from dsa_engine.kernels.runtime.transfer import download, upload
from dsa_engine.parallel import Mesh

# Puts likely drafts in the place of chosen tokens: of the rows' requests, their logits and the tokens.
PutDrafts = Callable[[Sequence[Wanted], torch.Tensor, torch.Tensor], torch.Tensor]


class Sampler:
    """Chooses tokens and exchanges them between the ranks.

    Args:
        config, mesh: of the engine.
        seed: of requests without a seed of their own.
        relaxed: puts likely drafts in the place of chosen tokens.
    """

    def __init__(self, config: ModelConfig, mesh: Mesh, seed: int, relaxed: PutDrafts | None = None):
        self._config = config
        self._mesh = mesh
        self._seed = seed
        self._relaxed = relaxed
        self._terms = LogitsProcessors(config.eos_token_ids)

    def sample(self, plan: StepPlan, logits: torch.Tensor, sampled: torch.Tensor | None = None) -> StepResult:
        """Chooses the tokens of this rank's rows and gathers everybody's; nothing waits for the device.

        Args:
            plan: of the step; each request's rows of logits lie on one rank.
            logits: float32 ``[logits_rows of this rank, vocab]``; it is changed.
            sampled: ``StepResult.tokens`` of the step before, where they have not been read.
        """
        most = max(len(rank_plan.logits_rows) for rank_plan in plan.ranks)
        indices = _indices(plan, most)
        if not indices:
            return StepResult({}, torch.empty(0, dtype=torch.int64, device=logits.device), list, None)
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
        return StepResult(indices, everybodys, download(everybodys), logprobs)

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
        return tokens.where(highest != float("-inf"), NOTHING_LEFT)


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
