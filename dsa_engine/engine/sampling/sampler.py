"""From a step's logits to the next tokens of all ranks' requests, which stay on the device until they are read.

`logits_processors.py` changes the logits (penalties, biases); `draw.py` draws by temperature, top-k, top-p and min-p.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from dsa_engine.config.model import ModelConfig
from dsa_engine.engine.requests.samples import NOT_FINITE, NOTHING_LEFT
from dsa_engine.engine.sampling.draw import log_probabilities, sample
from dsa_engine.engine.sampling.logits_processors import LogitsProcessors
from dsa_engine.engine.sampling.result import StepResult
from dsa_engine.engine.steps.plan import StepPlan, Wanted
from dsa_engine.kernels.runtime.transfer import to_host, upload
from dsa_engine.parallel import Mesh

# Replaces chosen tokens by likely drafts: called with the rows' requests and positions, logits and chosen tokens.
PutDrafts = Callable[[Sequence[Wanted], torch.Tensor, torch.Tensor], torch.Tensor]


class Sampler:
    """Chooses tokens and exchanges them between the ranks.

    Args:
        relaxed: replaces chosen tokens by likely drafts; None accepts drafts strictly.
    """

    def __init__(self, config: ModelConfig, mesh: Mesh, relaxed: PutDrafts | None = None):
        self._config = config
        self._mesh = mesh
        self._relaxed = relaxed
        self._processors = LogitsProcessors(config.eos_token_ids)

    def sample(self, plan: StepPlan, logits: torch.Tensor, sampled: torch.Tensor | None = None) -> StepResult:
        """Chooses the tokens of this rank's rows and gathers those of all ranks, without waiting for the device.

        Args:
            plan: the step; the rows of logits of a request are on one rank.
            logits: float32 ``[tokens to choose on this rank, vocab]``; overwritten.
            sampled: ``StepResult.tokens`` of the step before, if they have not been read.
        """
        samples = plan.samples
        if samples.max_rows == 0:
            none = torch.empty(0, dtype=torch.int64, device=logits.device)
            return StepResult(samples, none, lambda: none)
        unmodified = logits.clone() if samples.max_logprobs >= 0 else logits
        wanted = plan.own.wanted
        total = logits.sum(dim=-1)  # finite if all logits of a row are; taken before some become -inf
        self._processors.apply(logits, wanted, sampled)
        tokens = self._choose(wanted, logits)
        if self._relaxed is not None:
            tokens = self._relaxed(wanted, logits, tokens)
        tokens = tokens.where(total.isfinite(), NOT_FINITE)
        padding = samples.max_rows - len(tokens)
        of_all_ranks = self._mesh.world.all_gather(F.pad(tokens, (0, padding)))
        logprobs = None
        if samples.max_logprobs >= 0:
            best = min(samples.max_logprobs, self._config.vocab_size)
            table = F.pad(log_probabilities(unmodified, tokens.clamp(min=0), best), (0, 0, 0, padding))
            logprobs = to_host(self._mesh.world.all_gather(table))
        return StepResult(samples, of_all_ranks, to_host(of_all_ranks), logprobs)

    def _choose(self, wanted: list[Wanted], logits: torch.Tensor) -> torch.Tensor:
        """A token for every row, int64 ``[n]``, or the code of an error, which concerns that row's request only."""
        highest, tokens = _highest(logits)  # the choice of all greedy requests
        drawn = [i for i, (request, *_) in enumerate(wanted) if request.params.temperature > 0]
        if drawn:
            rows = upload(torch.tensor(drawn, dtype=torch.int64), logits.device)
            requests, positions, _ = zip(*(wanted[i] for i in drawn), strict=True)
            keys = [request.draw_key for request in requests]
            tokens[rows] = sample(logits[rows], [r.params for r in requests], keys, positions)
        return tokens.where(highest != float("-inf"), NOTHING_LEFT)


def _highest(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The highest logit of each row, and its token, ``[n]`` each."""
    if logits.device.type != "cpu":
        highest, tokens = logits.max(dim=-1)
        return highest, tokens
    tokens = logits.argmax(dim=-1)  # max() on a CPU synchronises all threads, even for few rows
    return logits.gather(1, tokens[:, None])[:, 0], tokens
