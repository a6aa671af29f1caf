"""Runs cases and keeps what every rank got: torchrun … worker.py CASES.json FOLDER; :func:`run_case` in one process.

A case is a dictionary: ``name``, ``folder`` (of the model), ``options`` (of ``LLM``), ``parallel`` (of
``ParallelConfig``), ``prompts`` (token ids whose logits are wanted), ``generate``, a list of
``{"prompts": …, "params": [{…}, …]}``, and perhaps ``every``: then a generation's requests arrive one by one, every so
many steps. Requests with the seed ``broken_seed`` cannot be sampled on the rank that owns them.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from dsa_engine import LLM, ParallelConfig, RequestOutput, SamplingParams, runner
from dsa_engine.request import Request


def run_case(case: dict[str, Any]) -> dict[str, Any]:
    """``last`` and ``all`` logits of each prompt, ``tokens`` of each generation, and what the engine says of itself."""
    llm = LLM(case["folder"], parallel=ParallelConfig(**case.get("parallel", {})), **case.get("options", {}))
    engine = llm.engine
    free = engine.scheduler.free_pages
    result: dict[str, Any] = {
        "last": [engine.prefill(ids) for ids in case.get("prompts", [])],
        "all": [llm.prompt_logits(ids) for ids in case.get("prompts", [])],
        "tokens": [],
        "ends": [],
        "logprobs": [],
    }
    for request in case.get("generate", []):
        params = [SamplingParams(**p) for p in request["params"]]
        with broken_sampling(case.get("broken_seed")):
            if "every" in case:
                outs = one_by_one(llm, request["prompts"], params, case["every"])
            else:
                outs = llm.generate(request["prompts"], params)
        result["tokens"].append([out.token_ids for out in outs])
        result["ends"].append([(out.finish_reason, out.error) for out in outs])
        result["logprobs"].append([out.logprobs for out in outs])
    result["preemptions"] = engine.scheduler.preemptions
    result["bytes_read"] = engine.bytes_read
    result["experts"] = [layer.moe.gate_up.shape[0] for layer in engine.model.layers if layer.moe is not None]
    result["pages_lost"] = sum(free) - sum(engine.scheduler.free_pages)
    result["own_pages_lost"] = engine.cache.pages - engine.scheduler.own_free_pages
    return result


def one_by_one(llm: LLM, prompts: list[list[int]], params: list[SamplingParams], every: int) -> list[RequestOutput]:
    """Like ``LLM.generate``; one more request arrives every ``every`` steps."""
    requests: list[Request] = []
    step = 0
    while len(requests) < len(prompts) or llm.engine.scheduler.has_work:
        if step % every == 0 and len(requests) < len(prompts):
            number = len(requests)
            requests.append(Request(llm.engine, llm.engine.add(prompts[number], params[number]), None))
        llm.engine.step()
        step += 1
        for request in requests:
            request.advance()
    return [request.output() for request in requests]


@contextmanager
def broken_sampling(seed: int | None) -> Iterator[None]:
    """Makes the sampling of requests with this seed raise, as if that happened on one rank only."""
    sample = runner.sample

    def broken(logits: torch.Tensor, params: SamplingParams, its_seed: int, position: int) -> torch.Tensor:
        if its_seed == seed:
            raise ArithmeticError(f"broken at {position}")
        return sample(logits, params, its_seed, position)

    runner.sample = broken
    try:
        yield
    finally:
        runner.sample = sample


def main() -> None:
    cases, folder = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    results = {case["name"]: run_case(case) for case in cases}
    torch.save(results, folder / f"rank{os.environ['RANK']}.pt")


if __name__ == "__main__":
    main()
