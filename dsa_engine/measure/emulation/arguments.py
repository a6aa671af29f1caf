"""Measuring one rank of many on one device: the options of the benchmarks, and what their reports say about it."""

from __future__ import annotations

import argparse
from typing import Any

from dsa_engine.commands.arguments import llm_from, options_from
from dsa_engine.engine.engine import Engine
from dsa_engine.llm import LLM
from dsa_engine.measure.emulation.config import EmulatedConfig, EmulatedMesh
from dsa_engine.parallel import ParallelConfig


def measured_llm(args: argparse.Namespace) -> LLM:
    """The model that the options describe, on the run's ranks or as one emulated rank; prompts are computed in full."""
    if args.emulate_world is None:
        if args.emulate_rank is not None:
            raise ValueError("--emulate-rank needs --emulate-world, the number of ranks to emulate")
        return llm_from(args, enable_prefix_caching=False)
    emulated = {"emulate_world": args.emulate_world, "emulate_rank": args.emulate_rank or 0}
    parallel = EmulatedConfig(**options_from(args, ParallelConfig), **emulated)
    return llm_from(args, parallel=parallel, enable_prefix_caching=False)


HEADING = (
    "EMULATED: rank {rank} of {world_size}, in one process, even expert loads; tokens mean nothing.\n"
    "Messages of other ranks are copies on this device: no link is in these times (dsa-engine plan models links)."
)  # the line above every table of an emulated run
TITLE = "emulated: rank {rank} of {world_size}, without links"  # the part of a plot's title


def described(engine: Engine, text: str) -> str:
    """:data:`HEADING` or :data:`TITLE` of an emulated run; "" for other runs."""
    return text.format(**emulated["emulated"]) if (emulated := to_json(engine)) else ""


def to_json(engine: Engine) -> dict[str, Any]:
    """The key "emulated" of a result; empty for other runs."""
    mesh = engine.mesh
    return {"emulated": {"world_size": mesh.world_size, "rank": mesh.rank}} if isinstance(mesh, EmulatedMesh) else {}
