"""Measuring one rank of many on one device: the options of the scripts, and what their reports say about it."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dsa_engine.arguments import json_object, llm_from, parallel_from
from dsa_engine.config.model import ModelConfig
from dsa_engine.engine.engine import Engine
from dsa_engine.llm import LLM
from dsa_engine.measure.emulation.config import EmulatedConfig
from dsa_engine.measure.emulation.handover import EmulatedSending, part_of
from dsa_engine.measure.emulation.mesh import emulated
from dsa_engine.measure.emulation.routing import check_loads
from dsa_engine.model_folder import model_config
from dsa_engine.parallel.experts.loads_file import ExpertLoads
from dsa_engine.parallel.links import Links


def measured_llm(args: argparse.Namespace) -> tuple[LLM, Links]:
    """The model that the options describe, and the links on which an emulated rank would communicate. It computes
    every prompt in full.

    Raises:
        ValueError, OSError: an option or a file is not possible; then nothing has been loaded.
    """
    if args.emulate_world is None:
        for option in ("emulate_rank", "links"):
            if getattr(args, option) is not None:
                raise ValueError(f"--{option.replace('_', '-')} needs --emulate-world, the number of ranks to emulate")
        return llm_from(args, enable_prefix_caching=False), Links()
    links = Links.read(args.links) if args.links else Links()
    config = model_config(args.model, json_object(args.hf_overrides, "--hf-overrides"))
    own = asdict(parallel_from(args))
    if args.expert_loads is not None:
        own["expert_loads"] = _read_loads(args.expert_loads, config)
    parallel = EmulatedConfig(
        **own,
        emulate_world=args.emulate_world,
        emulate_rank=args.emulate_rank or 0,
        machine_size=links.machine_size,
    )
    llm = llm_from(args, parallel=parallel, enable_prefix_caching=False)
    if part_of(llm.engine) == "prefill":
        EmulatedSending(llm.engine)
    return llm, links


def check_part(args: argparse.Namespace, part: str, instead: str) -> None:
    """Checks that an emulated rank, if the options describe one of a run in two parts, belongs to ``part``.

    Args:
        instead: what measures a rank of the other part.

    Raises:
        ValueError: it does not.
    """
    if args.emulate_world is None or args.prefill_ranks is None:
        return
    rank = args.emulate_rank or 0
    own = "prefill" if rank < args.prefill_ranks else "decode"
    if own != part:
        raise ValueError(
            f"rank {rank} of --emulate-world {args.emulate_world} is one of those that {own}, with --prefill-ranks "
            f"{args.prefill_ranks}; {instead}, or give another --emulate-rank"
        )


def _read_loads(path: str, config: ModelConfig) -> str | tuple[float, ...]:
    """The loads of a list, the same in all layers; the path of a file of loads of each layer."""
    try:
        loads = json.loads(Path(path).read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid JSON ({error}); give a list of numbers, one for each expert") from error
    if isinstance(loads, dict) and "layers" in loads:
        for layer in ExpertLoads.read(path).loads:
            if any(layer):
                check_loads(layer, config.n_routed_experts, config.num_experts_per_tok)
        return path
    if not isinstance(loads, list):
        raise ValueError(f"{path} must hold a JSON list of numbers, one for each expert, not {loads!r:.80}")
    try:
        EmulatedConfig(emulate_world=2, expert_loads=tuple(loads))  # that they are numbers
        check_loads(loads, config.n_routed_experts, config.num_experts_per_tok)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return tuple(loads)


def heading(engine: Engine, links: Links) -> str:
    """The line above every table of an emulated run; "" for other runs."""
    mesh = emulated(engine.mesh)
    if mesh is None:
        return ""
    loads, part = "given" if mesh.config.expert_loads else "balanced", part_of(engine)
    ranks = f"{mesh.world_size}" + (f" that {part}" if part else "")
    return (
        f"EMULATED: rank {mesh.rank} of {ranks}, in one process, {loads} expert loads; tokens mean nothing.\n"
        f"Computation is measured; communication is modelled, not measured: {links}."
    )


def title(engine: Engine) -> str:
    """The part of a plot's title that describes the emulated run; "" for other runs."""
    mesh = emulated(engine.mesh)
    if mesh is None:
        return ""
    return f"emulated: rank {mesh.rank} of {mesh.world_size}; computation measured, communication modelled"


def to_json(engine: Engine, links: Links) -> dict[str, Any]:
    """The key "emulated" of a result; empty for other runs."""
    mesh = emulated(engine.mesh)
    if mesh is None:
        return {}
    loads = mesh.config.expert_loads
    given = list(loads) if isinstance(loads, tuple) else str(loads or "balanced")
    about: dict[str, Any] = {"part": part_of(engine)} if part_of(engine) else {}
    about |= {"world_size": mesh.world_size, "rank": mesh.rank, "expert_loads": given}
    return {"emulated": {**about, "links": links.to_json()}}
