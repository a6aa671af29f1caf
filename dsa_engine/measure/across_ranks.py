"""What the ranks of a run tell each other about a measurement."""

from __future__ import annotations

import torch

from dsa_engine.engine.agreement import agree_on_call
from dsa_engine.engine.engine import Engine
from dsa_engine.measure.emulation.mesh import EmulatedMesh


def from_all_ranks(engine: Engine, values: list[float]) -> list[list[float]]:
    """The same numbers of every rank, to every rank, in rank order; of an emulated run, its only one."""
    if isinstance(engine.mesh, EmulatedMesh):
        return [values]
    mine = torch.tensor([values], dtype=torch.float64, device=engine.mesh.device)
    return engine.mesh.world.all_gather(mine).tolist()


def stages_of_all_ranks(engine: Engine, values: dict[str, float]) -> list[dict[str, float]]:
    """The same of numbers by name: a dictionary a rank."""
    return [dict(zip(values, row, strict=True)) for row in from_all_ranks(engine, list(values.values()))]


def agree_on_prompts(engine: Engine, prompts: list[list[int]]) -> None:
    """``ValueError`` where the ranks measure different prompts."""
    if not isinstance(engine.mesh, EmulatedMesh):
        agree_on_call(engine.mesh, "a measurement", prompts, [])


def barrier(engine: Engine) -> None:
    """Waits until every rank is here."""
    from_all_ranks(engine, [0.0])


def num_processes(engine: Engine) -> int:
    """Of the run: an emulated rank is alone."""
    return 1 if isinstance(engine.mesh, EmulatedMesh) else engine.mesh.world_size
