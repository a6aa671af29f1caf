"""Time to first token: [torchrun --nproc-per-node N] scripts/measure_ttft.py [--input-len 8192,32768]

With --mixed short prompts come during a long one, and 200 requests of published lengths, scaled down, 95% of whose
tokens are found in the prefix cache; on this CPU, in seconds and, whatever else the machine does, in tokens computed.
"""

from __future__ import annotations

import random
import sys
import time
from typing import Any

import numpy as np

from dsa_engine import LLM, SamplingParams
from dsa_engine.cli import script

# Of prompts, the median's tokens (55K, scaled down) and the deviation of the logarithm (90% are below 280K, scaled).
MEDIAN, SPREAD = 600, 1.27


def replay(llm: LLM, trace: list[tuple[float, list[int]]]) -> np.ndarray[Any, Any]:
    """Runs prompts, each from its arrival in tokens computed on; returns TTFT in tokens and seconds, and the end's."""
    engine, waiting, idle = llm.engine, list(trace), 0.0
    times, begun = dict[int, float](), list[Any]()
    start, base = time.perf_counter(), engine.num_prefilled_tokens + engine.num_generated_tokens
    while waiting or engine.has_work:
        now = idle + engine.num_prefilled_tokens + engine.num_generated_tokens - base
        if not engine.has_work and waiting[0][0] > now:
            idle, now = idle + waiting[0][0] - now, waiting[0][0]
        while waiting and waiting[0][0] <= now:
            arrival, prompt = waiting.pop(0)
            request = engine.add(prompt, SamplingParams(max_tokens=8, ignore_eos=True))
            begun.append((request, arrival, time.perf_counter()))
        engine.step()
        now = idle + engine.num_prefilled_tokens + engine.num_generated_tokens - base
        times |= {number: now for number, one in enumerate(begun) if one[0].output and number not in times}
    first = [(times[number] - one[1], one[0].first_token_at - one[2]) for number, one in enumerate(begun)]
    return np.array([*first, (now - idle, time.perf_counter() - start)])


def mixed() -> None:
    rng = random.Random(0)
    options: dict[str, Any] = {"device": "cpu", "progress": False, "max_num_batched_tokens": 1024, "max_num_seqs": 64}
    llm = LLM("demo", max_model_len=32_768, cache_memory="1GiB", **options)

    def prompt(length: float) -> list[int]:
        return [rng.randrange(700) for _ in range(int(length))]

    (alone, seconds), _ = replay(llm, [(0, prompt(24_576))])
    beside = replay(llm, [(0, prompt(24_576)), *((2_400.0 * number, prompt(200)) for number in range(1, 9))])[:-1]
    p90 = np.quantile(beside[1:], 0.9, axis=0) / beside[0]
    of_alone = beside[0] / (alone, seconds)
    print(f"24,576 tokens alone: TTFT {alone:,.0f} tokens, {seconds:.2f} s; with eight of 200 beside it times")
    print(f"{of_alone[0]:.2f} and {of_alone[1]:.2f}; p90 of theirs, as a part of that: {p90[0]:.3f} and {p90[1]:.3f}")
    lengths = [min(30_000, rng.lognormvariate(np.log(MEDIAN), SPREAD)) for _ in range(40)]
    documents = [prompt(length) for length in lengths]
    replay(llm, [(0, document) for document in documents[:30]])
    new = [prompt(rng.choice(lengths)) if number % 20 == 10 else [] for number in range(200)]
    prompts = [one or rng.choice(documents[:30]) + prompt(rng.randint(8, 64)) for one in new]
    gap, cache = 1.25 * sum((len(one) or 80) + 8 for one in new) / 200, llm.engine.scheduler.prefix_cache
    queries, hits = cache.queries, cache.hits
    result = replay(llm, [(gap * number, one) for number, one in enumerate(prompts)])
    p50, p99 = np.quantile(result[:-1], [0.5, 0.99], axis=0)
    print(
        f"200 requests, {(cache.hits - hits) / (cache.queries - queries):.1%} of tokens found: TTFT p50 {p50[0]:,.0f} "
        f"tokens, {p50[1]:.3f} s; p99 {p99[0]:,.0f} tokens, {p99[1]:.3f} s; {result[-1, 0]:,.0f} tokens computed in "
        f"{result[-1, 1]:.1f} s"
    )


if __name__ == "__main__":
    mixed() if "--mixed" in sys.argv else script("bench ttft", __doc__)
