"""What the ranks of a run tell each other about a measurement; an emulated rank is its run's only process."""

from __future__ import annotations

import torch

from dsa_engine.engine.agreement import agree_on_call
from dsa_engine.engine.engine import Engine


def from_all_ranks(engine: Engine, values: list[float]) -> list[list[float]]:
    """The same numbers of every process, to every process, in rank order."""
    mine = torch.tensor([values], dtype=torch.float64, device=engine.mesh.device)
    return engine.mesh.processes.all_gather(mine).tolist()


def stages_of_all_ranks(engine: Engine, values: dict[str, float]) -> list[dict[str, float]]:
    """The same for numbers by name: a dictionary for each process."""
    return [dict(zip(values, row, strict=True)) for row in from_all_ranks(engine, list(values.values()))]


def agree_on_prompts(engine: Engine, prompts: list[list[int]]) -> None:
    """Raises ``ValueError`` if the ranks measure different prompts."""
    agree_on_call(engine.mesh, "a measurement", prompts, [])


def barrier(engine: Engine) -> None:
    """Waits until every process is here."""
    from_all_ranks(engine, [0.0])


def num_processes(engine: Engine) -> int:
    """Processes of the run."""
    return engine.mesh.processes.size
