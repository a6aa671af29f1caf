"""Runs cases and keeps what every rank got: torchrun … worker.py CASES.json FOLDER; :func:`run_case` in one process.

A case is a dictionary: ``name``, ``folder`` (of the model), ``options`` (of ``LLM``), ``parallel`` (of
``ParallelConfig``), ``prompts`` (token ids whose logits are wanted), and ``generate``, a list of
``{"prompts": …, "params": [{…}, …]}``.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from dsa_engine import LLM, ParallelConfig, SamplingParams


def run_case(case: dict[str, Any]) -> dict[str, Any]:
    """``last`` and ``all`` logits of each prompt, ``tokens`` of each generation, and what the engine says of itself."""
    llm = LLM(case["folder"], parallel=ParallelConfig(**case.get("parallel", {})), **case.get("options", {}))
    engine = llm.engine
    free = engine.scheduler.free_pages
    result: dict[str, Any] = {
        "last": [engine.prefill(ids) for ids in case.get("prompts", [])],
        "all": [llm.prompt_logits(ids) for ids in case.get("prompts", [])],
        "tokens": [],
    }
    for request in case.get("generate", []):
        outs = llm.generate(request["prompts"], [SamplingParams(**p) for p in request["params"]])
        result["tokens"].append([out.token_ids for out in outs])
    result["bytes_read"] = engine.bytes_read
    result["experts"] = [layer.moe.gate_up.shape[0] for layer in engine.model.layers if layer.moe is not None]
    result["pages_lost"] = sum(free) - sum(engine.scheduler.free_pages)
    result["own_pages_lost"] = engine.cache.pages - engine.scheduler._allocator.free
    return result


def main() -> None:
    cases, folder = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    results = {case["name"]: run_case(case) for case in cases}
    torch.save(results, folder / f"rank{os.environ['RANK']}.pt")


if __name__ == "__main__":
    main()
