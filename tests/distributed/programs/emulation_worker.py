"""Counts the work of one rank: emulation_worker.py CASES.json FOLDER on several ranks; :func:`run_case` in one process.

A case is a dictionary: ``name``, ``world_size``, ``parallel`` (of ``ParallelConfig``), ``options`` (of ``LLM``),
``prompts`` of several batches, and ``nodes`` of the ranks (default: all are on one). Each batch is prefilled; then
every rank decodes a filled request. A true run spreads pairs as an
emulated one does, which cannot know the `topk_ids` of another rank's router.
"""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from collectives import record
from dsa_engine import LLM, ParallelConfig, SamplingParams
from dsa_engine.kernels.moe.expert_order import local_topk_ids
from dsa_engine.measure.emulation.config import EmulatedConfig
from dsa_engine.measure.timed_generation import generate_batch
from dsa_engine.parallel import Mesh


def run_case(case: dict[str, Any], emulate_rank: int | None = None) -> dict[str, Any]:
    """Counts for this rank, or for the emulated one."""
    parallel = ParallelConfig(**case["parallel"])
    if emulate_rank is not None:
        emulation = {"emulate_world": case["world_size"], "emulate_rank": emulate_rank}
        if "nodes" in case:
            emulation["node_size"] = case["nodes"].count(0)
        parallel = EmulatedConfig(**case["parallel"], **emulation)
    with patch.object(Mesh, "_exchange_nodes", lambda _: case["nodes"]) if "nodes" in case else nullcontext():
        llm = LLM("demo-random", parallel=parallel, **case["options"])
    engine, mesh = llm.engine, llm.engine.mesh
    result: dict[str, Any] = {
        "rank": mesh.rank,
        "weight_bytes": sum(weight.nbytes for weight in engine.model.parameters()),
        "weight_bytes_read": engine.bytes_read,
        "cache_pages": engine.cache.pages,
        "cache_bytes": sum(p.nbytes for p in [*engine.cache.latent, *engine.cache.index_keys] if p is not None),
        "tokens": [],
        "attention_pairs": [],
        "free_pages": [],
        "expert_pairs": [],
    }
    plan = engine.runner.plan

    def noted(scheduled: Any) -> Any:
        step = plan(scheduled)
        result["tokens"].append(step.own.rows)
        result["attention_pairs"].append(sum(s.visible_pairs for s in step.own.segments))
        result["free_pages"].append(engine.cache.pages - sum(len(c.request.pages) for c in scheduled.chunks))
        return step

    engine.runner.plan = noted  # type: ignore[method-assign]
    from dsa_engine.weights.formats import base

    multiply = base.expert_mlp

    def counted(tokens: torch.Tensor, topk_ids: torch.Tensor, *rest: Any, **more: Any) -> torch.Tensor:
        _, _, (down,), _ = rest
        local = local_topk_ids(topk_ids, len(down), more["first"])
        pairs = local[local >= 0].flatten().long().bincount(minlength=len(down))
        result["expert_pairs"].append((len(tokens), pairs.tolist()))
        return multiply(tokens, topk_ids, *rest, **more)

    before = [group.bytes_sent for group in mesh.groups]
    log = record(*mesh.groups)
    base.expert_mlp = counted
    try:
        begin = time.perf_counter()
        with mesh.experts.even_routing():
            mesh.together(lambda: None, 60.0)  # rank 0 waits for no other rank in a call: all route evenly before it
            for prompts in case["prompts"]:
                llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=1))
            generate_batch(engine, [[5] * 300] * case["world_size"], 3, fill_cache=True)
        result["seconds"] = time.perf_counter() - begin
    finally:
        base.expert_mlp = multiply
    result["bytes_sent"] = [group.bytes_sent - n for group, n in zip(mesh.groups, before, strict=True)]
    result["collectives"] = [tuple(one) for one in log]
    return result


def main() -> None:
    cases, folder = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    torch.save({case["name"]: run_case(case) for case in cases}, folder / f"rank{os.environ['RANK']}.pt")


if __name__ == "__main__":
    main()
