"""Calls from event loops, together with those of threads: each gets the same tokens as alone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from typing import Any

import pytest

from dsa_engine import LLM, CapacityError, SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
LONG = SamplingParams(temperature=0.0, max_tokens=90, ignore_eos=True)


@pytest.fixture(scope="module")
def shared(tiny_llm: Callable[..., LLM]) -> LLM:
    return tiny_llm(160)


async def streamed(llm: LLM, prompt: list[int], params: SamplingParams) -> tuple[list[int], str]:
    tokens: list[int] = []
    text = ""
    async for piece in llm.astream(prompt, params):
        tokens += piece.token_ids
        text += piece.text
    assert piece.finish_reason is not None
    return tokens, text


def test_a_task_that_is_cancelled_and_a_stream_that_is_closed(llm: LLM) -> None:
    wanted = llm.generate([[5, 6]], LONG)[0].token_ids

    async def first_tokens() -> list[int]:
        tokens: list[int] = []
        async with aclosing(llm.astream([5, 6], LONG)) as pieces:
            async for piece in pieces:
                tokens += piece.token_ids
                if len(tokens) > 5:
                    return tokens
        raise AssertionError

    async def everything() -> None:
        task = asyncio.create_task(llm.agenerate([[7, 8], [9]], LONG))
        tokens = await first_tokens()
        assert tokens == wanted[: len(tokens)]
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.to_thread(llm.wait_idle)
        assert not llm.engine.scheduler.has_work
        assert (await streamed(llm, [5, 6], LONG))[0] == wanted

    asyncio.run(everything())


def test_errors_come_to_whom_they_belong(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = llm.generate([[5, 6]], GREEDY)[0].token_ids
    launch = llm.engine.runner.launch

    def failing(plan: Any, *rest: Any) -> Any:
        requests = [chunk.request for chunk in plan.chunks]
        if any(list(request.prompt) == [11] for request in requests):
            raise RuntimeError("out of memory")
        return launch(plan, *rest)

    monkeypatch.setattr(llm.engine.runner, "launch", failing)
    monkeypatch.setattr(llm.engine.scheduler, "_max_num_seqs", 1)

    async def everything() -> list[Any]:
        return await asyncio.gather(
            streamed(llm, [5, 6], GREEDY),
            streamed(llm, [11], GREEDY),
            llm.agenerate([[5, 6]], GREEDY),
            llm.agenerate([[5, 6], [11]], GREEDY),
            streamed(llm, [320], GREEDY),
            llm.agenerate([[9] * 140], SamplingParams(max_tokens=60)),
            return_exceptions=True,
        )

    results = asyncio.run(everything())
    assert results[0][0] == wanted and results[2][0].token_ids == wanted
    assert [type(results[n]) for n in (1, 3, 4, 5)] == [RuntimeError, RuntimeError, ValueError, CapacityError]
    assert str(results[1]) == str(results[3]) == "out of memory"


def test_the_loop_goes_on_meanwhile(llm: LLM) -> None:
    async def everything() -> int:
        turns = 0
        task = asyncio.create_task(llm.agenerate([[5, 6]], LONG))
        while not task.done():
            turns += 1
            await asyncio.sleep(0)
        assert len((await task)[0].token_ids) == 90
        assert await llm.agenerate([]) == []
        return turns

    assert asyncio.run(everything()) > 90


def test_a_loop_that_ends_leaves_nothing(llm: LLM) -> None:
    """The request of a generator that is never closed ends with its event loop."""

    async def begin() -> None:
        pieces = llm.astream([5, 6], LONG)
        await anext(pieces)

    asyncio.run(begin())
