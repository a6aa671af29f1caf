"""Several loads at once, sent by rank 0 to the engine of all ranks: each load has its own result.

So the times of requests that decode can be read apart from those of long prompts that arrive meanwhile. A request's
times are those of its pieces at the caller; no figure includes network or HTTP.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

from dsa_engine.commands.bench.serving.in_process import check_serving
from dsa_engine.commands.bench.serving.load import Conversation, ServingLoad
from dsa_engine.commands.bench.serving.result import ServingResult, latencies
from dsa_engine.llm import LLM
from dsa_engine.sampling_params import SamplingParams


def measure_side_by_side(llm: LLM, loads: Mapping[str, ServingLoad], warmup: int = 1) -> dict[str, ServingResult]:
    """Sends the requests of all loads as they arrive, and waits for all of them. No request uses what another has
    computed. Rank 0 calls this while the other ranks follow (:meth:`~dsa_engine.llm.LLM.follow`).

    Args:
        loads: by name; each request is a conversation of one turn.
        warmup: number of other requests of each load that are run first and not counted.

    Returns:
        the result of each load; its duration is that of all of them.

    Raises:
        ValueError, CapacityError: a load has conversations of several turns, or a request that is not possible.
    """
    for load in loads.values():
        if any(len(requests) > 1 for requests in load.lengths()):
            raise ValueError(f"{load.dataset.name} has conversations of several turns; requests here have one")
        check_serving(llm.engine, load)
    return asyncio.run(_measure(llm, loads, warmup))


async def _measure(llm: LLM, loads: Mapping[str, ServingLoad], warmup: int) -> dict[str, ServingResult]:
    vocabulary = llm.engine.config.vocab_size
    for _ in range(warmup):
        for name, load in loads.items():
            await _Load(llm, load, f"warmup {name}").send(0, load.warmup(vocabulary), time.perf_counter())
    begin = time.perf_counter()
    running = {name: _Load(llm, load, name) for name, load in loads.items()}
    await asyncio.gather(*(one.run(begin) for one in running.values()))
    duration = time.perf_counter() - begin
    ranks = llm.engine.mesh.world_size
    return {
        name: ServingResult.of(one.load, duration, ranks, one.sent, one.max_at_once, {})
        for name, one in running.items()
    }


class _Load:
    """The requests of one load.

    Attributes:
        sent: the figures of those that have ended, as :class:`.result.ServingResult` has them.
        max_at_once: maximum number of them at once.
    """

    def __init__(self, llm: LLM, load: ServingLoad, name: str):
        self.load = load
        self.sent: list[dict[str, Any]] = []
        self.max_at_once = self._now = 0
        self._llm, self._name = llm, name

    async def run(self, begin: float) -> None:
        """Sends each request at its arrival, or as soon as ``max_concurrency`` allows."""
        slots = asyncio.Semaphore(self.load.max_concurrency or 1_000_000_000)
        conversations = self.load.conversations(self._llm.engine.config.vocab_size)

        async def one(number: int, arrival: float) -> None:
            await asyncio.sleep(max(0.0, begin + arrival - time.perf_counter()))
            async with slots:
                await self.send(number, conversations[number], time.perf_counter())

        await asyncio.gather(*(one(number, arrival) for number, arrival in enumerate(self.load.arrivals())))

    async def send(self, number: int, conversation: Conversation, begin: float) -> None:
        """Sends one request and waits for its last piece."""
        (prompt,), (output_len,) = conversation.questions, conversation.output_lens
        params = SamplingParams(
            temperature=0.0, max_tokens=output_len, ignore_eos=self.load.ignore_eos, detokenize=False
        )
        salted = {"prompt_token_ids": prompt, "cache_salt": f"{self._name} {number}"}
        self._now += 1
        self.max_at_once = max(self.max_at_once, self._now)
        times: list[float] = []
        tokens, cached, error = 0, 0, None
        async for piece in self._llm.astream(salted, params):
            if piece.token_ids:
                times.append(time.perf_counter())
                tokens += len(piece.token_ids)
            if piece.finish_reason is not None:
                error = piece.error
                cached = piece.metrics.num_cached_tokens if piece.metrics else 0
        self._now -= 1
        about = {
            "conversation": number,
            "turn": 0,
            "input_len": len(prompt),
            "output_len": tokens,
            "num_cached_tokens": cached,
            "error": error,
        }
        self.sent.append(about if error is not None else about | latencies(begin, times, tokens))
