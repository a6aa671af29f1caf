"""Log-probabilities of prompts' own tokens, where requests ask: of every row that a token of the prompt follows.

In prefill the rows of a prompt lie on all ranks of a group: each multiplies its own with the LM head, a block at a time
so that the logits fit the workspace, and what is kept of them is gathered.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from dsa_engine.engine.requests.request import Request
from dsa_engine.engine.sampling.draw import log_probabilities, ranked
from dsa_engine.engine.steps.plan import RankPlan, StepPlan
from dsa_engine.kernels.runtime.transfer import upload
from dsa_engine.model.model import Model
from dsa_engine.outputs import Logprobs


class _Row(NamedTuple):
    row: int  # of the rank's hidden states
    request: Request
    position: int  # of the token that follows


def prompt_logprobs(model: Model, plan: StepPlan, hidden: torch.Tensor) -> dict[Request, dict[int, Logprobs]]:
    """Of each request that asks, and has a part of its prompt in this step: by position of the token; the same on every
    rank. It waits for the device; where nobody asks, nothing is done.

    Args:
        plan: of the step.
        hidden: ``[rows of this rank, hidden]``.
    """
    wanted = [_wanted(rank_plan) for rank_plan in plan.ranks]
    most = max(len(rows) for rows in wanted)
    if most == 0:
        return {}
    mesh, vocab = model.runtime.mesh, model.config.vocab_size
    asked = [row.request.params.prompt_logprobs or 0 for rows in wanted for row in rows]
    own = wanted[mesh.rank]
    indices = upload(torch.tensor([row.row for row in own], dtype=torch.int64), hidden.device)
    ids = [row.request.prompt[row.position] for row in own]
    tokens = upload(torch.tensor(ids, dtype=torch.int64), hidden.device)
    # Logits, their log-softmax and a comparison of it at a time, for every rank of the tensor-parallel group.
    block = max(1, model.runtime.workspace // (12 * vocab * mesh.tp.size))
    tables = []
    for first in range(0, most, block):
        part, count = slice(first, first + block), min(block, most - first)
        logits = model.logits(hidden[indices[part]], count)
        table = log_probabilities(logits, tokens[part], min(max(asked), vocab))
        tables.append(F.pad(table, (0, 0, 0, count - len(table))))
    gathered = mesh.world.all_gather(torch.cat(tables)).tolist()
    found: dict[Request, dict[int, Logprobs]] = {}
    for rank, rows in enumerate(wanted):
        for (_, request, position), values in zip(rows, gathered[rank * most :], strict=False):
            token, count = request.prompt[position], request.params.prompt_logprobs or 0
            found.setdefault(request, {})[position] = ranked(token, values, count)
    return found


def _wanted(rank_plan: RankPlan) -> list[_Row]:
    """The rows of a rank whose next token is one of the prompt that nothing is known of yet."""
    wanted = []
    for segment in rank_plan.segments:
        request = rank_plan.chunks[segment.sequence].request
        if request.prompt_logprobs is None:
            continue
        first = max(segment.start + 1, len(request.prompt_logprobs))
        last = min(segment.start + segment.length, len(request.prompt) - 1)
        wanted += [_Row(segment.row + p - 1 - segment.start, request, p) for p in range(first, last + 1)]
    return wanted
