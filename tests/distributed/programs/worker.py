"""Runs cases and stores the results of every rank: worker.py CASES.json FOLDER; :func:`run_case` in one process.

A case is a dictionary: ``name``, ``folder`` (of the model), ``options`` (of ``LLM``), ``parallel`` (of
``ParallelConfig``), ``prompts`` (token ids, for logits), ``generate``, a list of
``{"prompts": …, "params": [{…}, …]}``, and optionally:

* ``last_pages``: the pages with the largest numbers are taken first.
* ``every``: requests arrive one by one, with so many steps between them; with ``aborts``, that of every fifth step the
  youngest ends that decodes, so many in all.
* ``broken_seed``: requests with this seed get logits that are not finite.
* ``ahead``: decode steps are launched before the previous tokens are read.
* ``adaptive``: steps have random numbers of drafts; default: as many as possible.
* ``thoughts``: the tokens that begin and end thoughts.
* ``padded``: decode steps have the shapes of CUDA graphs.
* ``waiting``: micro-batches send their tokens when the other one computes, as on CUDA.
* ``script``: outputs of the requests, from which drafts are made (:func:`script_drafts`).
* ``preempts``: requests lose their pages now and then.
* ``max_fetched``: maximum number of pages that a rank sends, or receives, in a step.
* ``pages``: of each rank's cache.
* ``nodes``: the node of each rank; default: all are on this one.
* ``threads``: of PyTorch and the CPU's kernels.
* ``bits``: the logits are kept by the tokens before them (:func:`record_logits`).
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from collectives import record
from dsa_engine import LLM, ParallelConfig, SamplingParams
from dsa_engine.engine.calls.jobs import prefill
from dsa_engine.engine.calls.reply import Inbox, Reply
from dsa_engine.engine.engine import Engine
from dsa_engine.engine.requests.draft_number import DraftNumber
from dsa_engine.engine.requests.limits import Add, new_requests
from dsa_engine.engine.requests.samples import Ended, RequestTokens, StepTokens
from dsa_engine.engine.startup import start
from dsa_engine.engine.steps import batch
from dsa_engine.engine.steps.context_buckets import ContextBuckets
from dsa_engine.engine.steps.graphs import DecodeGraphs
from dsa_engine.engine.steps.plan import StepPlan
from dsa_engine.measure.across_ranks import barrier
from dsa_engine.model.forward_batch import ForwardBatch, MicroBatchPair
from dsa_engine.outputs import CompletionOutput, RequestOutput
from dsa_engine.parallel import Mesh
from dsa_engine.text.tokenizer import THINKING


def run_case(case: dict[str, Any], parallel: ParallelConfig | None = None) -> dict[str, Any]:
    """``last`` and ``all`` logits of each prompt, ``tokens`` of each generation, and counters of the engine."""
    if "threads" in case:
        torch.set_num_threads(case["threads"])
    parallel = parallel or ParallelConfig(**case.get("parallel", {}))
    if case.get("waiting"):
        with patch.object(batch, "MicroBatchPair", waiting_pair):
            return run_case(case | {"waiting": False}, parallel)
    with ExitStack() as patched:
        if "nodes" in case:
            patched.enter_context(patch.object(Mesh, "_exchange_nodes", lambda _: case["nodes"]))
        if "pages" in case:
            patched.enter_context(patch.object(start, "affordable_pages", lambda *_: case["pages"]))
        llm = LLM(case["folder"], parallel=parallel, **case.get("options", {}))
    engine = llm.engine
    engine.set_num_drafts(None if case.get("adaptive") else engine.options.num_drafts)
    if case.get("adaptive"):
        decoding = engine.scheduler.decoding
        decoding.draft_number = RandomNumber(decoding.draft_number.choices)
    engine.async_scheduling = case.get("ahead", False)
    if "thoughts" in case:
        llm.tokenizer.tags = dict(zip(THINKING, case["thoughts"], strict=True))
    ledger = engine.scheduler.ledger
    ledger.max_fetched = case.get("max_fetched", ledger.max_fetched)
    for pool in ledger.pools if case.get("last_pages") else ():
        pool.unused = [pages[::-1] for pages in pool.unused]
    fetched: list[int] = []
    engine.after_launch = (*engine.after_launch, lambda chunks: fetched.extend(len(chunk.fetches) for chunk in chunks))
    log = record(engine.mesh.cp)
    if case.get("padded"):
        engine.runner.graphs = DecodeGraphs(
            engine.model, engine.cache, capture=False, contexts=ContextBuckets(fewest=32)
        )
    break_logits(engine, case.get("broken_seed"))
    rows = record_logits(engine) if case.get("bits") else {}
    drafts = script_drafts(llm, case["script"]) if "script" in case else {}
    if case.get("preempts"):
        preempt_now_and_then(llm)
    free = engine.scheduler.free_pages
    last = [prefill(engine, ids) for ids in case.get("prompts", [])]
    barrier(engine)  # a call of rank 0 would find the other ranks' engines busy
    result: dict[str, Any] = {
        "last": last,
        "all": [llm.prompt_logits(ids) for ids in case.get("prompts", [])],
        "tokens": [],
        "ends": [],
        "logprobs": [],
        "prompt_logprobs": [],
        "selections": [],
        "accepted": [],
    }
    for ids, logits in zip(case.get("prompts", []), result["all"] if case.get("bits") else [], strict=False):
        for position, row in enumerate(logits):
            see(rows, ids[: position + 1], row)
    for request in case.get("generate", []):
        params = [SamplingParams(**p) for p in request["params"]]
        if "every" in case:
            outs: Sequence[CompletionOutput | RequestOutput] = one_by_one(
                llm, request["prompts"], params, case["every"], case.get("aborts", 0)
            )
        else:
            outs = llm.generate(request["prompts"], params)
        result["tokens"].append([out.token_ids for out in outs])
        seen = [out.selection for out in outs if out.selection is not None]
        result["selections"] += [(torch.tensor(one.positions), torch.tensor(one.weights)) for one in seen]
        result["ends"].append([(out.finish_reason, out.error) for out in outs])
        counts = [out.metrics.speculation for out in outs]
        result["accepted"].append(sum(one.num_accepted_tokens for one in counts if one is not None))
        asked = [out.prompt_logprobs for out in outs if isinstance(out, RequestOutput) and out.prompt_logprobs]
        result["prompt_logprobs"].append(
            [[of and {token: (float(x), x.rank) for token, x in of.items()} for of in prompt] for prompt in asked]
        )
        plain = [out.logprobs and [{token: float(x) for token, x in of.items()} for of in out.logprobs] for out in outs]
        result["logprobs"].append(plain)
    result["drafts"], result["bits"] = drafts, rows
    result["preemptions"] = engine.scheduler.preemptions
    result["hits"] = engine.scheduler.prefix_cache.hits
    result["fetched"], result["in_host"] = sum(fetched), int((ledger.index.slot >= 0).sum())
    steps = engine.cache_steps
    result["read"] = steps.loads.pages_read if steps and steps.loads else 0
    result["written"] = steps.stores.pages_written if steps and steps.stores else 0
    result["moved_bytes"] = engine.rebalancing.moved_bytes if engine.rebalancing else 0
    result["page_bytes"], result["latent_bytes"] = engine.cache.page_bytes, engine.cache.latent[0].nbytes
    result["fetched_bytes"] = sum(sum(one.sent) for one in log if one.kind == "all_to_all")
    result["launched_ahead"] = engine.launched_ahead
    result["bytes_read"] = engine.bytes_read
    result["experts"] = [layer.moe.experts.count for layer in engine.model.layers if layer.moe is not None]
    result["pages_lost"] = sum(free) - sum(engine.scheduler.free_pages)
    together = engine.mesh.dcp.size
    pages, spilling = engine.cache.pages + engine.cache.spilled, engine.scheduler.spilling
    result["own_pages_lost"] = together * pages - engine.scheduler.free_pages[engine.mesh.rank // together]
    result["spilled"] = spilling.spilled if spilling is not None else 0
    if steps and steps.stores:
        llm.close()  # when all is written, which another case may read
    return result


class RandomNumber(DraftNumber):
    """Another number every fourth step, as if a trial had ended; none every eighth."""

    def launched(self) -> bool:
        self._step, self.watches = getattr(self, "_step", 0) + 1, True
        return self._step % 4 == 0 and self.adapts

    def choose(self, requests: int) -> None:
        super().choose(requests)
        self.number = random.Random(self._step).choice(self.choices) if self._step % 8 else 0
        self.watches = self.due = True


def waiting_pair(
    both: Sequence[Callable[[], ForwardBatch]], order: Callable[[], torch.Tensor] | None
) -> MicroBatchPair:
    """A pair whose tokens wait for their counts."""
    unsent: list[Any] = []
    first, second = (lambda make=make: replace(make(), unsent=unsent) for make in both)  # type: ignore[misc]
    return MicroBatchPair((first, second), order)


def one_by_one(
    llm: LLM, prompts: list[list[int]], params: list[SamplingParams], every: int, aborts: int = 0
) -> list[CompletionOutput]:
    """Like ``LLM.generate``; one more request arrives every ``every`` steps, and ``aborts`` are aborted."""
    inbox, replies = Inbox(lambda stopped: None), list[Reply]()
    step = 0
    if (steps := llm.engine.cache_steps) and steps.loads:  # the loop waits for messages over the hosts' group meanwhile
        steps.loads.group = llm.engine.mesh.world
    while len(replies) < len(prompts) or llm.engine.has_work:
        if step % every == 0 and len(replies) < len(prompts):
            (add,) = new_requests(prompts[len(replies)], params[len(replies)], None, llm.engine.limits)
            add.id = next(llm.engine.ids)
            llm.engine.queue(add)
            replies.append(Reply(add, None, lambda item: None))
            inbox.replies[add.id] = replies[-1]
        for tokens in llm.engine.step():
            inbox.put(tokens)
        step += 1
        decoding = [request for request in llm.engine.scheduler.running if request.prefilled]
        if aborts and step % 5 == 0 and decoding:
            llm.engine.finish(last := decoding[-1], "abort")
            assert last.ending is not None
            inbox.put(StepTokens.only([Ended(last.id, [], last.ending, last.record)]))
            aborts -= 1
    barrier(llm.engine)
    return [reply.completion(0) for reply in replies]


def script_drafts(llm: LLM, outputs: list[list[int]]) -> dict[tuple[int, int], tuple[int, list[int]]]:
    """Replaces the module's drafts; the request and its length determine how many are right: none, some, all.

    Returns:
        by request and its length, the number of accepted drafts and the module's new drafts; filled while requests run.
    """
    engine, loop, vocab = llm.engine, llm.loop, llm.engine.config.vocab_size
    begin, take, made = loop._begin, engine._take, {}

    def begun(add: Add) -> None:
        begin(add)
        loop._requests[add.id].tracked = True  # on every rank, to compare them

    def taken(sampled: RequestTokens) -> Ended | None:
        result, request = take(sampled), sampled.request
        if request.finish_reason is None and sampled.draft_result is not None:
            drafts, done = request.drafts, len(request) - len(request.prompt)
            made[request.id, len(request)] = sampled.draft_result.accepted, drafts
            right = outputs[request.id][done : done + len(drafts)]
            num_right = (done * 5 + len(request.prompt)) % (len(drafts) + 2)
            request.drafts = [token if i < num_right else (token + 1) % vocab for i, token in enumerate(right)]
            decoding = engine.scheduler.decoding
            decoding.table.drafts[decoding.requests.index(request)] = len(request.drafts)
        return result

    loop._begin, engine._take = begun, taken  # type: ignore[method-assign]
    return made


def preempt_now_and_then(llm: LLM) -> None:
    """Every third step, three times, the youngest request that decodes loses its pages."""
    engine, steps = llm.engine, 0
    original = engine.step

    def step() -> list[StepTokens]:
        nonlocal steps
        sampled = original()
        steps += 1
        decoding = [request for request in engine.scheduler.running if request.prefilled]
        if steps % 3 == 0 and decoding and engine.scheduler.preemptions < 3:
            engine.scheduler.preempt(decoding[-1])
        return sampled

    engine.step = step  # type: ignore[method-assign]


def break_logits(engine: Engine, seed: int | None) -> None:
    """Spoils the logits of requests with this seed, on the rank that owns them."""
    original = engine.runner.sampled_logits

    def broken(plan: StepPlan, hidden: torch.Tensor) -> torch.Tensor:
        logits = original(plan, hidden)
        for row, (request, *_) in zip(logits, plan.own.wanted, strict=True):
            if seed is not None and request.params.seed == seed:
                row[3] = float("nan")
        return logits

    engine.runner.sampled_logits = broken  # type: ignore[method-assign]


def record_logits(engine: Engine) -> dict[bytes, list[torch.Tensor]]:
    """Gets the logits of each step of this rank, by the tokens before them; different ones for the same tokens."""
    original, seen = engine.runner.sampled_logits, {}

    def recorded(plan: StepPlan, hidden: torch.Tensor) -> torch.Tensor:
        logits = original(plan, hidden)
        for row, (request, position, _) in zip(logits, plan.own.wanted, strict=True):
            see(seen, request.tokens(0, position), row)
        return logits

    engine.runner.sampled_logits = recorded  # type: ignore[method-assign]
    return seen


def see(seen: dict[bytes, list[torch.Tensor]], tokens: list[int], row: torch.Tensor) -> None:
    rows = seen.setdefault(np.array(tokens, np.int32).tobytes(), [])
    if not any(torch.equal(row.view(torch.int32), other.view(torch.int32)) for other in rows):
        rows.append(row.clone())


def with_numbers(keys: dict[str, Any]) -> dict[Any, Any]:
    """Token ids of a ``logit_bias``, which are strings in JSON."""
    return {int(key) if key.isdigit() else key: value for key, value in keys.items()}


def main() -> None:
    cases, folder = json.loads(Path(sys.argv[1]).read_text(), object_hook=with_numbers), Path(sys.argv[2])
    results = {case["name"]: run_case(case) for case in cases}
    torch.save(results, folder / f"rank{os.environ['RANK']}.pt")


if __name__ == "__main__":
    main()
