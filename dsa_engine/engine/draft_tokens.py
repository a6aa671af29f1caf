"""The tokens that the states of an MTP module draft, on the rank that has them and on every other."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from dsa_engine.engine.request import Request
from dsa_engine.engine.sampler import Samples
from dsa_engine.engine.step_plan import StepPlan
from dsa_engine.kernels.transfer import upload
from dsa_engine.model.model import Model
from dsa_engine.parallel import Mesh


def ranks_of(step: StepPlan, samples: Samples) -> list[int]:
    """The rank that has the rows of logits, of every request that is sampled."""
    of = {request: rank for rank, plan in enumerate(step.ranks) for _, request in plan.logits_rows}
    return [of[request] for request in samples.indices]


def places_of(step: StepPlan) -> dict[Request, int]:
    """Where each request of a padded step lies among the rows of all ranks, one for each request of a bucket."""
    assert step.bucket is not None
    return {
        chunk.request: rank * step.bucket.requests + i
        for rank, plan in enumerate(step.ranks)
        for i, chunk in enumerate(plan.chunks)
    }


def most_likely(model: Model, mesh: Mesh, module: int, hidden: torch.Tensor, ranks: Sequence[int]) -> torch.Tensor:
    """int64 ``[n]`` tokens of this rank's states ``[n, hidden]`` of an MTP module; ``ranks``: of all requests."""
    most = max(ranks.count(rank) for rank in mesh.tp.ranks)
    if most == 0:
        return torch.empty(0, dtype=torch.int64, device=hidden.device)
    return model.own_logits(hidden, most, module).argmax(dim=-1)


def of_all_ranks(mesh: Mesh, tokens: torch.Tensor, ranks: Sequence[int]) -> torch.Tensor:
    """``tokens`` of this rank's requests, of everybody's: int64 ``[requests]``, in the order of ``ranks``."""
    seen = [0] * mesh.world_size
    index = []
    for rank in ranks:
        index.append((rank, seen[rank]))
        seen[rank] += 1
    gathered = mesh.world.all_gather(F.pad(tokens, (0, max(seen) - len(tokens))))
    return gathered[upload(torch.tensor([rank * max(seen) + i for rank, i in index]), mesh.device)]
