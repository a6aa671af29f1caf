"""Log-probabilities of a prompt's own tokens, for requests with ``prompt_logprobs``.

In prefill the rows of a prompt are divided over the ranks of a group. Each rank multiplies its rows by the LM head, a
block at a time so that the logits fit in the workspace; then the log-probabilities are gathered.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from dsa_engine.engine.requests.request import Request
from dsa_engine.engine.requests.samples import ranked
from dsa_engine.engine.sampling.sampler import log_probabilities
from dsa_engine.engine.steps.plan import RankPlan, StepPlan, Wanted
from dsa_engine.kernels.runtime.transfer import upload
from dsa_engine.model.model import Model
from dsa_engine.outputs import Logprobs


def prompt_logprobs(model: Model, plan: StepPlan, hidden: torch.Tensor) -> dict[Request, dict[int, Logprobs]]:
    """Log-probabilities of the prompt tokens in this step, by request and position; the same on every rank.

    It waits for the device if a request wants them.

    Args:
        hidden: ``[rows of this rank, hidden]``.
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
