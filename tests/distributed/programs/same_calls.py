"""Every rank makes the same calls, then rank 0 alone: same_calls.py FOLDER. Each rank writes what it got."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from dsa_engine import LLM, ParallelConfig, SamplingParams

FOLDER, RANK = Path(sys.argv[1]), int(os.environ["RANK"])
OPTIONS: dict[str, Any] = {"device": "cpu", "max_model_len": 256, "cache_memory": "8MiB", "page_size": 8}
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
LONG = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)


class Local(Exception):
    """An error that cannot be pickled."""

    def __init__(self, one: str, other: str):
        super().__init__(f"{one} {other}")


def error_of(call: Callable[[], object]) -> str:
    try:
        call()
    except (Exception, KeyboardInterrupt) as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("no error")


async def gathered(llm: LLM) -> list[Any]:
    """Two calls and a stream of one event loop, at once."""

    async def stream() -> list[list[int]]:
        return [piece.token_ids async for piece in llm.astream([9, 8], GREEDY)]

    first, second, pieces = await asyncio.gather(
        llm.agenerate([[5, 6]], GREEDY), llm.agenerate([[7]], GREEDY), stream()
    )
    return [first[0].token_ids, second[0].token_ids, pieces]


def every_rank_calls(llm: LLM) -> dict[str, Any]:
    got: dict[str, Any] = {}
    if RANK == 1:
        time.sleep(0.5)  # rank 0 waits for no other rank
    prompt = [5, 6, 7] if RANK == 0 else [10**6]  # those of other ranks are not looked at
    outputs = llm.generate(["def main():", prompt], SamplingParams(max_tokens=8, seed=1, logprobs=2))
    got["generate"] = [[out.token_ids, out.text, repr(out.outputs[0].logprobs)] for out in outputs]
    got["chat"] = llm.chat([{"role": "user", "content": "Hello"}], GREEDY)[0].message
    with closing(llm.stream([4, 5], GREEDY)) as pieces:  # type: ignore[type-var]
        got["stream"] = [[piece.token_ids, piece.text, piece.finish_reason] for piece in pieces]
    with closing(llm.stream([4, 5], LONG)) as pieces:  # type: ignore[type-var]
        got["left"] = [next(pieces).token_ids for _ in range(3)]
    if RANK == 0:
        got["gathered"] = asyncio.run(gathered(llm))
    else:
        got["in an event loop"] = error_of(lambda: asyncio.run(gathered(llm)))
    got["logits"] = llm.prompt_logits([5, 6, 7, 8]).tolist()
    got["reset"] = llm.reset_prefix_cache()
    return got


def errors(llm: LLM) -> dict[str, str]:
    """Each is raised on rank 0 only, in a call that would be possible elsewhere."""
    raised = {}
    for what, wrong in (("token", [2, 10**6]), ("length", [2] * 300), ("empty", [])):
        raised[what] = error_of(lambda wrong=wrong: llm.generate([[5], wrong if RANK == 0 else [6]], GREEDY))  # type: ignore[misc]
        raised[f"{what} of logits"] = error_of(lambda wrong=wrong: llm.prompt_logits(wrong if RANK == 0 else [6]))  # type: ignore[misc]
    with patch.object(llm, "_generate", side_effect=Local("not", "sent")):
        raised["local"] = error_of(lambda: llm.generate([[5]], GREEDY))
    with patch.object(llm, "prepare", side_effect=KeyboardInterrupt):
        raised["interrupt"] = error_of(lambda: llm.generate([[5]], GREEDY))
    if RANK == 0:
        with closing(llm.stream([5], LONG)) as pieces:  # type: ignore[type-var]
            next(pieces)
    else:
        raised["left"] = error_of(lambda: list(llm.stream([5], LONG)))
    with ThreadPoolExecutor(4) as pool:  # calls of other threads are rank 0's own
        calls = [pool.submit(llm.generate, [[5 + number]], GREEDY) for number in range(4)]
        if RANK == 0:
            assert all(len(call.result()[0].token_ids) == 8 for call in calls)
        else:
            raised["thread"] = error_of(calls[0].result)
    return raised


def main() -> None:
    torch.set_num_threads(1)
    with LLM("demo-random", **OPTIONS) as llm:
        got = every_rank_calls(llm)
        got["errors"] = errors(llm)
        got["after"] = llm.generate([[5, 6, 7]], GREEDY)[0].token_ids
        if RANK > 0:
            got["closed"] = error_of(lambda: llm.generate([[5]], GREEDY))  # rank 0 closes instead
    for _ in range(2):
        llm = LLM("demo-random", **OPTIONS, parallel=ParallelConfig(timeout=20))
        if RANK == 0:
            calls = [llm.agenerate([[5, 6, number]], GREEDY) for number in range(4, 7)]

            async def at_once(calls: list[Any]) -> list[Any]:
                return await asyncio.gather(*calls)

            got.setdefault("at once", []).append([one[0].token_ids for one in asyncio.run(at_once(calls))])
            llm.close()
        else:
            llm.follow()
            got["followed"] = error_of(lambda llm=llm: llm.generate([[5]], GREEDY))  # type: ignore[misc]
    (FOLDER / f"rank{RANK}.json").write_text(json.dumps(got))


main()
