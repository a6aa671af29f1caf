"""Exchange of measured values between the ranks of a run."""

from __future__ import annotations

from hashlib import blake2b

import torch

from dsa_engine.engine.engine import Engine
from dsa_engine.parallel.agreement import compare


def from_all_ranks(engine: Engine, values: list[float]) -> list[list[float]]:
    """Gathers ``values`` of all processes, a row per process, on every process; an emulated run has one."""
    mine = torch.tensor([values], dtype=torch.float64, device=engine.mesh.device)
    return engine.mesh.processes.all_gather(mine).tolist()


def agree_on_prompts(engine: Engine, prompts: list[list[int]]) -> None:
    """Raises ``ValueError`` if the ranks measure different prompts, or the run is disaggregated."""
    mesh = engine.mesh
    if mesh.has_counterpart:
        raise ValueError("this measurement is of an engine that prefills and decodes; leave out prefill_ranks")
    if mesh.processes.size > 1:
        digest = blake2b(repr(prompts).encode(), digest_size=8).hexdigest()
        compare({"the digest of the prompts": digest}, mesh.run_ranks, mesh.run_rank, mesh.config.timeout)


def barrier(engine: Engine) -> None:
    """Waits until every process has called it."""
    from_all_ranks(engine, [0.0])
