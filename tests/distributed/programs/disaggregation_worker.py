"""Runs cases with P/D disaggregation: disaggregation_worker.py PREFILL_RANKS CASES.json FOLDER.

Cases: ``options`` of ``LLM``, and ``parallel`` of its ranks; ``generate``, a list of ``[prompt, params]`` that run
together; ``cancelled``, the number of streams that are closed early meanwhile; ``repeated``, how often all of that
runs; ``engines``, the number of engines that do so one after the other; ``continued``: each request then goes on after
its last output. Or ``soak``, a number of streams in threads that arrive at random. Or ``held``: the first request is
streamed while a step of the second one does not end. ``killed``: this rank kills itself after some steps.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

from dsa_engine import LLM, ParallelConfig, SamplingParams


def counts(llm: LLM) -> dict[str, Any]:
    """What this rank has sent or received, and the pages that no request has given back."""
    engine, side = llm.engine, llm.loop.side  # type: ignore[attr-defined]
    for end in (side.sender, side.receiver):
        if end is not None:
            end.poll()
    copies = engine.cache_steps.transfer.copies if engine.cache_steps.transfer else None
    return {
        "lost": engine.mesh.world_size * engine.cache.pages - sum(engine.scheduler.free_pages),
        "preemptions": engine.scheduler.preemptions,
        "pages": engine.cache.pages,
        "tp_size": engine.mesh.tp.size,
        "moved": engine.rebalancing.times if engine.rebalancing else 0,
        "to_host": copies.bytes_to_host if copies else 0,
        "from_host": copies.bytes_from_host if copies else 0,
        "from_disk": engine.cache_steps.loads.pages_read if engine.cache_steps.loads else 0,
        "to_disk": engine.cache_steps.stores.pages_written if engine.cache_steps.stores else 0,
        "page_bytes": engine.cache.page_bytes,
        "sent": side.sender.bytes_moved if side.sender else 0,
        "received": side.receiver.bytes_moved if side.receiver else 0,
        "hits": engine.scheduler.prefix_cache.hits,
        "prefilled": engine.num_prefilled_tokens,
        "generated": engine.num_generated_tokens,
        "running": len(engine.scheduler.running),
    }


def cancel(llm: LLM, generate: list[Any], number: int) -> None:
    rng = random.Random(number)
    for _ in range(number):
        prompt, params = rng.choice(generate)
        with closing(llm.stream(prompt, SamplingParams(**params | {"prompt_logprobs": None, "n": 1}))) as pieces:
            for _ in range(rng.randrange(3)):
                next(pieces, None)


def soak(llm: LLM, case: dict[str, Any]) -> dict[str, Any]:
    """Tokens of streams that arrive at random, a part of them closed early, and the memory before and after."""
    from caches import resident_bytes  # support of the tests, which programs on several nodes do not have

    kinds = case["generate"]

    def stream(number: int) -> tuple[int, list[int], str | None]:
        rng = random.Random(number)
        kind, tokens, reason = rng.randrange(len(kinds)), list[int](), None
        time.sleep(rng.expovariate(10))
        stop = rng.randrange(1, 20) if rng.random() < 0.2 else 1000
        with closing(llm.stream(kinds[kind][0], SamplingParams(**kinds[kind][1]))) as pieces:  # type: ignore[type-var]
            for piece in pieces:
                tokens, reason = tokens + piece.token_ids, piece.finish_reason
                if len(tokens) >= stop:
                    break
        return kind, tokens, reason

    with ThreadPoolExecutor(24) as pool:
        streams = list(pool.map(stream, range(case["soak"] // 3)))
        begun = resident_bytes()
        streams += pool.map(stream, range(case["soak"] // 3, case["soak"]))
    llm.wait_idle()
    return {"streams": streams, "memory": [begun, resident_bytes()]}


def held(llm: LLM, case: dict[str, Any]) -> dict[str, Any]:
    """The outputs of two requests; the second one's prefill ends only when the first one has all its tokens."""
    (first, params), second = case["generate"]
    step, streamed = llm.engine.step, threading.Event()

    def wait_and_step() -> Any:
        assert streamed.wait(60), "no tokens came during a step"
        return step()

    with closing(llm.stream(first, SamplingParams(**params))) as pieces, ThreadPoolExecutor(1) as pool:
        tokens = [token for _ in range(2) for token in next(pieces).token_ids]  # the second one is of the decode side
        llm.engine.step = wait_and_step  # type: ignore[method-assign]
        other = pool.submit(llm.generate, [second[0]], SamplingParams(**second[1]), use_tqdm=False)
        tokens += [token for piece in pieces for token in piece.token_ids]
        streamed.set()
        outputs = [tokens, other.result()[0].outputs[0].token_ids]
    llm.wait_idle()
    return {"outputs": outputs}


def die_after(llm: LLM, steps: int) -> None:
    while llm.loop.steps < steps:
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGKILL)


def run(llm: LLM, case: dict[str, Any]) -> dict[str, Any]:
    """The outputs of all requests, and the number of tokens that were found in the prefix cache."""
    generate, results, cached = case["generate"], [], []
    for _ in range(case.get("repeated", 1)):
        thread = threading.Thread(target=cancel, args=(llm, generate, case.get("cancelled", 0)))
        thread.start()
        prompts, params = zip(*generate, strict=True)
        done = llm.generate(list(prompts), [SamplingParams(**one) for one in params], use_tqdm=False)
        thread.join()
        results.append([plain(one) for one in done])
        cached.append([one.metrics.num_cached_tokens for one in done])
        if case.get("continued"):
            prompts = [[*one.prompt_token_ids, *one.outputs[0].token_ids, 5] for one in done]
            generate = list(zip(prompts, params, strict=True))
    llm.wait_idle()
    return {"outputs": results, "cached": cached}


def plain(request: Any) -> list[Any]:
    """What is compared of a request's outputs."""
    return [
        [
            out.token_ids,
            out.text,
            out.finish_reason,
            out.stop_reason,
            out.logprobs and [{str(token): float(value) for token, value in of.items()} for of in out.logprobs],
            request.prompt_logprobs
            and [of and {str(token): float(value) for token, value in of.items()} for of in request.prompt_logprobs],
        ]
        for out in request.outputs
    ]


def main() -> None:
    prefill, case, folder = int(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text()), Path(sys.argv[3])
    parallel = ParallelConfig(prefill_ranks=prefill, timeout=case.get("timeout", 300), **case.get("parallel", {}))
    for _ in range(case.get("engines", 1) - 1):
        with LLM(device="cpu", parallel=parallel, **case["options"]) as before:
            _ = run(before, case) if os.environ["RANK"] == "0" else before.follow()
    llm = LLM(device="cpu", parallel=parallel, **case["options"])
    rank, result = int(os.environ["RANK"]), dict[str, Any]()
    if rank == case.get("killed"):
        threading.Thread(target=die_after, args=(llm, case["steps"]), daemon=True).start()
    if rank == 0:
        with llm:
            work = soak if "soak" in case else held if "held" in case else run
            result = work(llm, case)
    else:
        llm.follow()
    (folder / f"rank{rank}.json").write_text(json.dumps(result | counts(llm)))


if __name__ == "__main__":
    main()
