"""Eager steps: from logits to the next tokens of all ranks' requests, which stay on the device until they are read, and
to log-probabilities of these and of prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from dsa_engine.config.model import ModelConfig
from dsa_engine.engine.requests.request import Request
from dsa_engine.engine.requests.samples import StepResult, ranked
from dsa_engine.engine.sampling.chain import chain
from dsa_engine.engine.sampling.grammar import GrammarMasks
from dsa_engine.engine.sampling.logits_processors import LogitsProcessors
from dsa_engine.engine.steps.plan import RankPlan, StepPlan, Wanted
from dsa_engine.kernels.runtime.transfer import to_host, upload
from dsa_engine.model.model import Model
from dsa_engine.outputs import Logprobs
from dsa_engine.parallel import Mesh

# Replaces chosen tokens by likely drafts: called with the rows' requests and positions, logits and chosen tokens.
PutDrafts = Callable[[Sequence[Wanted], torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass
class Sampler:
    _config: ModelConfig
    _mesh: Mesh
    _relaxed: PutDrafts | None
    _grammars: GrammarMasks | None

    def __post_init__(self) -> None:
        self._processors = LogitsProcessors(self._config.eos_token_ids)
        self.counts = self._processors.counts

    def sample(self, plan: StepPlan, logits: torch.Tensor, before: StepResult | None = None) -> StepResult:
        """Chooses the tokens of this rank's rows and gathers those of all ranks. It does not wait for the device, but
        for the tokens of the step ``before``, if they have not been read and a request with a grammar has some.
        ``logits``: float32 ``[tokens to choose on this rank, vocab]``, overwritten; those of a request are on one rank.
        """
        samples, sampled = plan.samples, None if before is None else before.tokens
        if samples.max_rows == 0:
            none = torch.empty(0, dtype=torch.int64, device=logits.device)
            return StepResult(samples, none, to_host(none))
        unmodified = logits.clone() if samples.max_logprobs >= 0 else logits
        wanted = plan.own.wanted
        inputs = self._processors.inputs(wanted, logits, sampled)
        if self._grammars is not None:
            numbers, read = range(len(wanted)), None if before is None else before.codes
            if (masks := self._grammars.masks(wanted, numbers, len(wanted), read)) is not None:
                inputs = inputs._replace(masks=upload(masks, logits.device))
        if self._relaxed is not None:
            inputs = inputs._replace(put_drafts=partial(self._relaxed, wanted))
        tokens = chain(logits, inputs)
        padding = samples.max_rows - len(tokens)
        of_all_ranks = self._mesh.world.all_gather(F.pad(tokens, (0, padding)) if padding else tokens)
        logprobs = None
        if samples.max_logprobs >= 0:
            best = min(samples.max_logprobs, self._config.vocab_size)
            table = F.pad(log_probabilities(unmodified, tokens.clamp(min=0), best), (0, 0, 0, padding))
            logprobs = to_host(self._mesh.world.all_gather(table))
        made = None if plan.decode is None else plan.num_drafts
        return StepResult(samples, of_all_ranks, to_host(of_all_ranks), logprobs, num_drafts=made)


def log_probabilities(logits: torch.Tensor, tokens: torch.Tensor, count: int) -> torch.Tensor:
    """Log-probabilities of ``tokens [n]``, int64, and of the ``count`` most likely, by float32 ``logits [n, vocab]``.

    Returns:
        float64 ``[n, 2 + 2 * count]``, exact for any token id: the log-probability of the token; its rank, the number
        of tokens at least as likely; the ids of the most likely tokens, in order; their log-probabilities.
    """
    of_all = logits.log_softmax(dim=-1)
    best, ids = of_all.topk(count, dim=-1)
    own = of_all.gather(1, tokens[:, None])
    rank = (of_all >= own).sum(dim=-1, keepdim=True)
    return torch.cat((own.double(), rank.double(), ids.double(), best.double()), dim=1)


def prompt_logprobs(model: Model, plan: StepPlan, hidden: torch.Tensor) -> dict[Request, dict[int, Logprobs]]:
    """Log-probabilities of the prompt tokens in this step, by request and position; the same on every rank. It waits
    for the device if a request wants them.

    In prefill the rows of a prompt are divided over the ranks of a group. Each rank multiplies its rows of ``hidden``,
    ``[rows of this rank, hidden]``, by the LM head, a block at a time so that the logits fit in the workspace; then the
    log-probabilities are gathered.
    """
    if all(chunk.request.prompt_logprobs is None for chunk in plan.chunks):
        return {}
    wanted = [_wanted(plan.own if rank == plan.rank else plan.of_rank(rank)) for rank in range(len(plan.rows))]
    padded_rows = max(len(rows) for rows in wanted)
    if padded_rows == 0:
        return {}
    mesh, vocab = model.runtime.mesh, model.config.vocab_size
    asked = [row.request.params.prompt_logprobs or 0 for rows in wanted for row in rows]
    own = wanted[mesh.rank]
    indices = upload(torch.tensor([row.row for row in own], dtype=torch.int64), hidden.device)
    ids = [row.request.prompt[row.position] for row in own]
    tokens = upload(torch.tensor(ids, dtype=torch.int64), hidden.device)
    # At a time there are logits, their log-softmax and its comparison, of every rank of the tensor-parallel group.
    block = max(1, model.runtime.workspace // (12 * vocab * mesh.tp.size))
    tables = []
    for first in range(0, padded_rows, block):
        part, count = slice(first, first + block), min(block, padded_rows - first)
        logits = model.logits(hidden[indices[part]], count)
        table = log_probabilities(logits, tokens[part], min(max(asked), vocab))
        tables.append(F.pad(table, (0, 0, 0, count - len(table))))
    gathered = mesh.world.all_gather(torch.cat(tables)).tolist()
    logprobs: dict[Request, dict[int, Logprobs]] = {}
    for rank, rows in enumerate(wanted):
        for (request, position, _), values in zip(rows, gathered[rank * padded_rows :], strict=False):
            token, count = request.prompt[position], request.params.prompt_logprobs or 0
            logprobs.setdefault(request, {})[position] = ranked(token, values, count)
    return logprobs


def _wanted(rank_plan: RankPlan) -> list[Wanted]:
    """The rows of a rank that precede a prompt token whose log-probability is not known yet, in an order that does not
    depend on the padding of the step."""
    wanted = []
    for segment in sorted(rank_plan.segments, key=lambda s: (s.sequence, s.start)):
        request = rank_plan.chunks[segment.sequence].request
        if request.prompt_logprobs is None:
            continue
        first = max(segment.start + 1, len(request.prompt_logprobs))
        last = min(segment.start + segment.length, len(request.prompt) - 1)
        wanted += [Wanted(request, p, segment.row + p - 1 - segment.start) for p in range(first, last + 1)]
    return wanted
