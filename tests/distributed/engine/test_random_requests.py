"""Random requests get the same tokens with drafts as without, which one process computes: on 1 to 4 ranks, in eager
steps, in steps of static shape and launched ahead, recorded, preempted, with grammars, penalties, budgets of thoughts
and every limit, and whatever the number of drafts of a step."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

OPTIONS = {"device": "cpu", "max_model_len": 512, "page_size": 8, "cache_memory": "16MiB", "progress": False}
FORMS: list[Any] = [{"regex": "[a-f ]{3,40}x"}, {"choice": ["yes", "no", "perhaps"]}, {"json": {"type": "boolean"}}]
BATCH = 16
BEGIN, END = THOUGHTS = (300, 301)  # tokens


def random_params(rng: random.Random, kind: int) -> dict[str, Any]:
    """``kind``: 1 may have a grammar, 2 what needs the host in every step, 0 neither."""
    keys: dict[str, Any] = {"max_tokens": rng.randrange(1, 24), "ignore_eos": True}
    keys["temperature"] = rng.choice([0.0, 0.3, 0.7, 1.0, 1.0, 1.5])
    if rng.random() < 0.7:
        keys["seed"] = rng.randrange(2**32)
    for name, values in {
        "top_p": (0.5, 0.9, 0.95),
        "top_k": (1, 5, 50, 70),
        "min_p": (0.02, 0.2),
        "repetition_penalty": (1.3, 0.8),
        "frequency_penalty": (0.5, -0.2),
        "presence_penalty": (0.4, -0.3),
    }.items():
        if rng.random() < 0.25:
            keys[name] = rng.choice(values)
    if kind == 1 and rng.random() < 0.5:
        keys |= {"structured_outputs": rng.choice(FORMS), "ignore_eos": False}
    elif rng.random() < 0.2:
        keys["thinking_token_budget"] = rng.randrange(9)
    elif rng.random() < 0.2:
        keys["stop_token_ids"] = rng.sample(range(300), 100)
    if kind == 2 and rng.random() < 0.5:
        asked = [{"logprobs": 2}, {"bad_words": ["the", " of a"]}, {"allowed_token_ids": [*range(50, 250)]}]
        keys |= rng.choice([*asked, {"min_tokens": keys["max_tokens"]} if "structured_outputs" not in keys else {}])
    return keys


def random_requests(seed: int, batches: int) -> list[dict[str, Any]]:
    rng, generate = random.Random(seed), []
    for number in range(batches):
        prompts = [[rng.randrange(4, 400) for _ in range(rng.randrange(1, 60))] for _ in range(BATCH)]
        params = [random_params(rng, number % 3) for _ in range(BATCH)]
        for prompt, one in zip(prompts, params, strict=True):
            prompt += [BEGIN, 5] * ("thinking_token_budget" in one)
        generate.append({"prompts": prompts, "params": params})
    return generate


def case(drafts: int, name: str, cp: int = 1, tp: int = 1, dispatch: str = "all_gather", **more: Any) -> dict[str, Any]:
    parallel = {"cp_size": cp, "tp_size": tp, "moe_dispatch": dispatch, "decode_dispatch": dispatch}
    speculative = {"speculative_config": {"num_speculative_tokens": drafts}}
    eager = {"enforce_eager": "recorded" not in name}
    described = {"name": name, "folder": "demo", "parallel": parallel, "options": OPTIONS | eager | speculative | more}
    described |= {"thoughts": THOUGHTS}
    return described | {key: key in name for key in ("padded", "ahead", "adaptive")} | {"preempts": "preempted" in name}


CASES = {
    1: [
        case(3, "eager, adaptive"),
        case(3, "recorded, adaptive"),
        case(7, "padded, ahead, preempted"),
        case(2, "padded, ahead, adaptive"),
    ],
    2: [case(3, "cp 2, padded, ahead", 2), case(3, "groups, preempted, adaptive", dispatch="all_to_all")],
    3: [case(3, "cp 3, padded, ahead, adaptive", 3), case(1, "groups, preempted", dispatch="all_to_all")],
    4: [case(3, "cp 2, tp 2, padded, ahead", 2, 2), case(2, "invariant, padded, adaptive", 4, batch_invariant=True)],
}


@pytest.mark.parametrize(
    "world, batches", [(1, 3), (2, 3), *(pytest.param(w, 15, marks=pytest.mark.slow) for w in CASES)]
)
def test_the_same_tokens(
    world: int, batches: int, rank_results: Callable[..., list[Any]], worker: SimpleNamespace, tmp_path: Path
) -> None:
    cases = [one | {"generate": random_requests(100 * world + i, batches)} for i, one in enumerate(CASES[world])]
    if world == 1:
        ranks = [{one["name"]: worker.run_case(one) for one in cases}]
    else:
        ranks = rank_results(world, "worker.py", cases, tmp_path)
    for one in cases:
        plain = one | {"parallel": {}, "options": OPTIONS, "padded": False, "ahead": False, "preempts": False}
        plain["options"] = OPTIONS | {"batch_invariant": "invariant" in one["name"]}
        expected = worker.run_case(plain)
        for actual in (rank[one["name"]] for rank in ranks):
            for name in ("tokens", "ends"):
                assert actual[name] == expected[name], one["name"]
            assert sum(actual["accepted"]) > 10 * batches and actual["pages_lost"] == 0
            assert (actual["launched_ahead"] > 5) == one["ahead"]
            assert (actual["preemptions"] == 3) == one["preempts"]
        assert sum(END in tokens for batch in expected["tokens"] for tokens in batch) > batches, "thoughts that end"
