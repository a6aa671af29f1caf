"""The engine on one page on 2 and 4 ranks: logits as on one, tokens as the engine's on one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dsa_engine import LLM, SamplingParams
from dsa_engine.reference import dsa
from oracles import make_ids

PROMPTS = [make_ids(length, 700, seed=length) for length in (300, 5, 411, 90)]
CALLS = [
    {"prompts": PROMPTS, "max_tokens": 12},
    {"prompts": [PROMPTS[2][:200] + PROMPTS[0][:50], PROMPTS[0]], "max_tokens": 12, "drafts": 0},  # known beginnings
    {"prompts": PROMPTS, "max_tokens": 12, "temperature": 1.0, "seed": 5, "drafts": 2},
]
# On 2 ranks some lose their pages; on 4 each would have one request, as in CALLS.
FEW = [{"prompts": [make_ids(190, 700, seed=seed) for seed in range(4)], "max_tokens": 60, "drafts": 1}]
SIZES = {"page_size": 16, "chunk": 60}


@pytest.fixture(scope="module")
def wanted(demo_cache: Path) -> list[list[list[int]]]:
    llm = LLM("demo", device="cpu", dtype="float32", max_model_len=1024, cache_memory="64MiB", progress=False)

    def tokens(prompts: list[list[int]], drafts: int = 0, temperature: float = 0.0, **params: Any) -> list[list[int]]:
        return [one.token_ids for one in llm.generate(prompts, SamplingParams(temperature=temperature, **params))]

    return [tokens(**calls) for calls in (*CALLS, *FEW)]


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks(
    ranks: int, rank_results: Callable[..., Any], oracle: Callable[..., Any], wanted: Any, tmp_path: Path,
    assert_same_logits: Callable[..., None],
) -> None:  # fmt: skip
    folder, ids = oracle("deepseek_v32").folder, make_ids(333)
    cases = [
        {"model": "demo", "sizes": SIZES, "calls": CALLS},
        {"model": "demo", "sizes": SIZES | {"pages": 28}, "calls": FEW if ranks == 2 else []},
        {"model": str(folder), "sizes": SIZES, "ids": ids},
    ]
    of_ranks = rank_results(ranks, "page.py", cases, tmp_path)
    alone = dsa.load(folder, torch.float32).logits(ids)
    for calls, few, logits in of_ranks:
        assert [*calls, *few] == wanted[: len(CALLS) + len(few)] and len(few) == (ranks == 2)
        assert_same_logits(logits, alone, index_topk=64, what=f"{ranks} ranks")
        assert torch.equal(logits, of_ranks[0][2])
