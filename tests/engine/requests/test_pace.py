"""The length of prefill steps beside streams."""

from __future__ import annotations

import asyncio

import pytest

from dsa_engine import LLM, SamplingParams
from dsa_engine.engine.requests.prefill import PrefillPace
from dsa_engine.engine.requests.request import Chunk

GREEDY = {"temperature": 0.0, "ignore_eos": True}


def run(pace: PrefillPace, *steps: tuple[float, int]) -> list[int]:
    """Reads steps of so many seconds and prefilled tokens; the limit after each."""
    now, prefilled, limits = 100.0, 0, []
    for seconds, tokens in steps:
        pace.begin(now)
        now, prefilled = now + seconds, prefilled + tokens
        pace.read(now, prefilled)
        limits.append(pace.limit)
    return limits


def test_a_prefill_step_takes_at_most_eight_decode_steps() -> None:
    # 1 ms a token of prefill, 10 ms a decode step: 80 tokens, the power of two below it
    assert run(PrefillPace(None, 1024, 16), (0.5, 500), (0.01, 0)) == [1024, 64]


def test_max_tpot_contains_the_decode_step() -> None:
    assert run(PrefillPace(0.300, 1024, 16), (0.5, 500), (0.01, 0)) == [1024, 256]
    assert run(PrefillPace(0.300, 128, 16), (0.5, 500), (0.01, 0)) == [128, 128]
    assert run(PrefillPace(0.005, 1024, 16), (0.5, 500), (0.01, 0)) == [1024, 16], "prefill goes on"


def test_a_decode_step_beside_a_prefill_is_a_first_guess() -> None:
    """A long prompt may come with the first token of a stream: then no decode step is alone until it is prefilled."""
    assert run(PrefillPace(None, 1024, 16), (0.5, 500), (0.522, 512)) == [1024, 64]


def test_chunks_shrink_as_tokens_cost_more() -> None:
    pace = PrefillPace(None, 4096, 16)
    assert run(pace, (0.1, 100), (0.02, 0), (0.3, 128), (0.02, 0)) == [4096, 128, 64, 64]


def test_a_pause_is_no_step() -> None:
    pace = PrefillPace(None, 1024, 16)
    run(pace, (0.5, 500), (0.01, 0))
    pace.pause()
    pace.begin(1000.0)
    pace.read(1000.01, 500)
    assert pace.limit == 64


def test_chunks_beside_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long prompt comes in short chunks beside a stream, and in long ones beside a call that waits for its end."""
    llm = LLM("demo", max_num_batched_tokens=512, page_size=16, max_model_len=4096, enable_prefix_caching=False)
    chunks: list[list[Chunk]] = []

    def clock() -> float:  # 1 s a prefilled token, 10 s another step
        return llm.engine.num_prefilled_tokens + 10.0 * sum(all(c.length == 1 for c in step) for step in chunks)

    llm.engine.after_launch = (*llm.engine.after_launch, lambda step: chunks.append(list(step)))
    monkeypatch.setattr("dsa_engine.engine.loop.time.monotonic", clock)
    short, long, decodes = list(range(5, 37)), [7] * 1500, SamplingParams(max_tokens=40, **GREEDY)

    async def prefill_beside(stream: bool) -> list[int]:
        """Lengths of the chunks of a long prompt that comes while a short one decodes."""
        begun = len(chunks)
        if stream:
            streamed = llm.astream(short, decodes)
            await anext(streamed)
        else:
            generated = asyncio.create_task(llm.agenerate(short, decodes))
            while len(chunks) == begun:
                await asyncio.sleep(0)
        await llm.agenerate(long, SamplingParams(max_tokens=1, **GREEDY))
        if stream:
            async for _ in streamed:
                pass
        else:
            await generated
        lengths = [c.length for step in chunks[begun:] for c in step if c.length > 1]
        assert sum(lengths) == 1532
        return lengths[1:]

    async def both() -> None:
        assert max((await prefill_beside(stream=True))[1:]) <= 64
        llm.wait_idle()
        assert 512 in await prefill_beside(stream=False), "as before"

    asyncio.run(both())
    llm.close()
