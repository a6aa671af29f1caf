"""A request's tokens do not depend on the rest of the batch, on its arrival, or on preemption.

The same is shown for several ranks in ``distributed/engine/test_preemption.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dsa_engine import LLM, SamplingParams
from dsa_engine.engine.requests.request import Request

LENGTHS = [70, 5, 150, 1, 64, 33, 9, 2, 120, 65, 17, 90, 63, 40, 100, 3]
COUNT = 20
GREEDY = SamplingParams(temperature=0.0, max_tokens=COUNT, min_tokens=COUNT)  # as Oracle.greedy: no end token
SMALL = {"page_size": 2, "max_num_batched_tokens": 48}


def load(folder: Path, pages: int = 4000, **options: Any) -> LLM:
    """An ``LLM`` with a cache of ``pages`` pages of 2 tokens."""
    floats = 3 * (32 + 8 + 24)  # per token: layers, latent, RoPE, index key
    memory = pages * 2 * floats * 4
    llm = LLM(folder, device="cpu", max_model_len=512, cache_memory=memory, progress=False, **SMALL | options)
    assert llm.engine.cache.pages == pages
    return llm


def staggered(llm: LLM, prompts: list[list[int]], params: list[SamplingParams], every: int) -> list[Request]:
    """Runs all requests, which arrive one by one, every ``every`` steps."""
    sequences: list[Request] = []
    step = 0
    while llm.engine.scheduler.has_work or len(sequences) < len(prompts):
        if step % every == 0 and len(sequences) < len(prompts):
            sequences.append(llm.engine.add(prompts[len(sequences)], params[len(sequences)]))
        llm.engine.step()
        step += 1
    assert llm.engine.scheduler.free_pages == [llm.engine.cache.pages]
    return sequences


@pytest.fixture(scope="module")
def prompts(random_ids: Callable[..., list[int]]) -> list[list[int]]:
    return [random_ids(n, seed=i) for i, n in enumerate(LENGTHS)]


@pytest.fixture(scope="module")
def model(oracle: Callable[..., Any]) -> Any:
    return oracle("deepseek_v32")


@pytest.fixture(scope="module")
def alone(model: Any, prompts: list[list[int]]) -> list[list[int]]:
    """Greedy tokens of each prompt in a batch of one."""
    llm = load(model.folder, enable_prefix_caching=False)
    return [llm.generate([prompt], GREEDY)[0].token_ids for prompt in prompts]


def test_alone_as_transformers_generates(model: Any, prompts: list[list[int]], alone: list[list[int]]) -> None:
    assert alone == [model.greedy(prompt, COUNT) for prompt in prompts]


@pytest.mark.parametrize("every, fraction, ahead", [(3, 0.3, False), (1, 1.0, False), (3, 0.3, True), (1, 1.0, True)])
def test_in_a_batch_of_16(
    model: Any, prompts: list[list[int]], alone: list[list[int]], every: int, fraction: float, ahead: bool
) -> None:
    llm = load(model.folder, max_prefill_share=fraction)
    llm.engine.async_scheduling = ahead
    results = staggered(llm, prompts, [GREEDY] * 16, every)
    assert [s.output for s in results] == alone
    assert llm.engine.scheduler.preemptions == 0
    assert (llm.engine.launched_ahead > 10) == ahead


@pytest.mark.parametrize(
    "pages, every, ahead", [(85, 1, False), (160, 1, False), (160, 2, False), (85, 1, True), (160, 2, True)]
)
def test_with_preemption(
    model: Any, prompts: list[list[int]], alone: list[list[int]], pages: int, every: int, ahead: bool
) -> None:
    """85 pages just hold the longest request."""
    llm = load(model.folder, pages)
    llm.engine.async_scheduling = ahead
    results = staggered(llm, prompts, [GREEDY] * 16, every)
    assert [s.output for s in results] == alone
    assert llm.engine.scheduler.preemptions == sum(s.preemptions for s in results) >= 3
    assert (llm.engine.launched_ahead > 10) == ahead
