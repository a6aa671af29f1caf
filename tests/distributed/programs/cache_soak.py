"""Conversations about shared documents through caches that are far too small: cache_soak.py WORK.json RESULTS.json.

``WORK``: ``folder`` of the model, ``options`` of ``LLM``, ``conversations``: lists of turns, each with its ``prompt``,
``params`` and the right ``tokens``. Rank 0 runs up to twelve conversations at a time; some turns are left early.
``RESULTS``: counts, what was wrong, pages at the end.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
from collections import Counter
from contextlib import aclosing
from pathlib import Path
from typing import Any

from caches import resident_bytes
from dsa_engine import LLM, SamplingParams

AT_ONCE = 12


async def converse(llm: LLM, turns: list[dict[str, Any]], rng: random.Random, seen: Counter[str]) -> None:
    """Asks a conversation's questions in order; one in eight answers is left early, and then asked for again."""
    for turn in turns:
        leaves = rng.randint(0, len(turn["tokens"])) if rng.random() < 0.125 else None
        if leaves is not None:
            await ask(llm, turn, seen, leaves)
        await ask(llm, turn, seen, None)


async def ask(llm: LLM, turn: dict[str, Any], seen: Counter[str], leaves: int | None) -> None:
    tokens: list[int] = []
    prompt = {"prompt_token_ids": turn["prompt"]}
    async with aclosing(llm.astream(prompt, SamplingParams(**turn["params"]))) as pieces:
        async for piece in pieces:
            tokens += piece.token_ids
            if leaves is not None and len(tokens) >= leaves:
                break
    seen["requests"] += 1
    seen["left"] += leaves is not None
    seen["wrong"] += tokens != turn["tokens"][: len(tokens)] or (leaves is None and tokens != turn["tokens"])


async def soak(llm: LLM, conversations: list[list[dict[str, Any]]]) -> Counter[str]:
    seen: Counter[str] = Counter()
    waiting = list(enumerate(conversations))
    random.Random(0).shuffle(waiting)

    async def run() -> None:
        while waiting:
            number, turns = waiting.pop()
            await converse(llm, turns, random.Random(number), seen)

    await asyncio.gather(*(run() for _ in range(AT_ONCE)))
    return seen


def run(work: dict[str, Any]) -> dict[str, Any]:
    """Runs all conversations on this rank, or follows rank 0."""
    with LLM(work["folder"], **work["options"]) as llm:
        engine = llm.engine
        half = len(work["conversations"]) // 2
        results: dict[str, Any] = {}
        fetched: list[int] = []
        engine.after_launch = (*engine.after_launch, lambda some: fetched.extend(len(chunk.fetches) for chunk in some))
        if engine.mesh.rank == 0:
            first = asyncio.run(soak(llm, work["conversations"][:half]))
            results["memory"] = [resident_bytes()]
            seen = first + asyncio.run(soak(llm, work["conversations"][half:]))
            results |= {key: seen[key] for key in ("requests", "left", "wrong")}
            results["memory"].append(resident_bytes())
            llm.wait_idle()
        else:
            llm.follow()
        ledger = engine.scheduler.ledger
        results |= {"pages": ledger.pages, "free": ledger.free}
        results |= {"cached": [pool.free - sum(map(len, pool.unused)) for pool in ledger.pools]}
        results |= {"fetched": sum(fetched), "preemptions": engine.scheduler.preemptions}
        results |= {"hits": engine.scheduler.prefix_cache.hits, "queries": engine.scheduler.prefix_cache.queries}
        results |= {"in_host": (ledger.index.slot >= 0).sum(axis=1).tolist(), "slots": ledger.slots}
        results["from_host"] = engine.cache_steps.transfer.copies.bytes_from_host // engine.cache.page_bytes
        if engine.cache_steps.loads is not None:
            results["read"], results["written"] = (
                engine.cache_steps.loads.pages_read,
                engine.cache_steps.stores.pages_written,
            )
        return results


if __name__ == "__main__":
    described = json.loads(Path(sys.argv[1]).read_text())
    Path(f"{sys.argv[2]}.{os.environ.get('RANK', '0')}").write_text(json.dumps(run(described)))
