"""Requests that come one by one, find a part of their prompts in the cache and are preempted, on 1, 2 and 4 ranks, get
the tokens of a batch of one without a cache of prefixes.

All cases of a world size run in one launch.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

LENGTHS = [20, 5, 10, 1, 24, 13, 9, 16]
COUNT = 32
GREEDY = {"temperature": 0.0, "max_tokens": COUNT, "min_tokens": COUNT}
SAMPLED = {"temperature": 1.1, "top_k": 30, "min_p": 0.01, "max_tokens": COUNT, "ignore_eos": True}
TOKEN = 3 * (32 + 8 + 24) * 4  # bytes in the cache: layers, latent, RoPE, index key; float32
OPTIONS = {"device": "cpu", "max_model_len": 256, "page_size": 2, "max_num_batched_tokens": 32}
LARGE, SMALL = (
    {"cache_memory": TOKEN * 8192},
    {"cache_memory": TOKEN * 2 * 28},
)  # 28 pages just hold the longest request


def case(
    name: str, cp: int, size: dict[str, Any], every: int = 1, ahead: bool = False, **options: Any
) -> dict[str, Any]:
    options = OPTIONS | size | options
    return {"name": name, "parallel": {"cp_size": cp}, "options": options, "every": every, "ahead": ahead}


CASES = {
    1: [case("small", 1, SMALL)],
    2: [
        case("large", 2, LARGE, 3),
        case("small", 2, SMALL),
        case("groups", 1, SMALL),
        case("ahead", 2, SMALL, ahead=True),
    ],
    4: [
        case("large", 4, LARGE, 3),
        case("small", 4, SMALL, max_num_batched_tokens=8, max_prefill_share=0.3),
        case("groups", 2, SMALL, max_prefill_share=1.0),
        case("ahead", 2, SMALL, ahead=True),
    ],
}


@pytest.fixture(scope="module")
def model(oracle: Callable[..., Any]) -> Any:
    return oracle("deepseek_v32", index_topk=16)


@pytest.fixture(scope="module")
def requests(random_ids: Callable[..., list[int]]) -> dict[str, list[Any]]:
    """Half are greedy, half sampled; the last two fail, in different ways."""
    prompts = [random_ids(n, seed=i) for i, n in enumerate(LENGTHS)] * 2
    params: list[dict[str, Any]] = [GREEDY] * len(LENGTHS)
    params += [SAMPLED | {"seed": n, "logprobs": n % 3 if n % 2 else None} for n in range(len(LENGTHS))]
    for sampled in params[len(LENGTHS) + 2 :: 3]:  # penalties must survive a preemption
        sampled |= {"repetition_penalty": 1.3, "frequency_penalty": 0.6, "presence_penalty": 0.3}
    params[-2] = SAMPLED | {"seed": 666}
    params[-1] = SAMPLED | {"seed": 7, "min_tokens": 3, "stop_token_ids": list(range(200))}
    return {"prompts": prompts, "params": params}


@pytest.fixture(scope="module")
def alone(model: Any, requests: dict[str, list[Any]], worker: SimpleNamespace) -> list[dict[str, Any]]:
    """The results of each request in a batch of one, in this process."""
    pairs = [{"prompts": [p], "params": [q]} for p, q in zip(requests["prompts"], requests["params"], strict=True)]
    options = OPTIONS | LARGE | {"enable_prefix_caching": False}
    wanted = {"folder": str(model.folder), "options": options, "generate": pairs, "broken_seed": 666}
    actual = worker.run_case(wanted)
    assert actual["preemptions"] == 0
    return [{key: actual[key][n][0] for key in ("tokens", "ends", "logprobs")} for n in range(len(requests["prompts"]))]


# Four ranks on two cores take a minute, and follow the same rules as two.
@pytest.mark.parametrize("world", [pytest.param(w, marks=[pytest.mark.slow] * (w > 2)) for w in CASES])
def test_one_by_one_with_preemption(
    world: int,
    model: Any,
    requests: dict[str, list[Any]],
    alone: list[dict[str, Any]],
    rank_results: Callable[..., list[Any]],
    worker: SimpleNamespace,
    tmp_path: Path,
) -> None:
    cases = [
        c | {"folder": str(model.folder), "generate": [requests], "broken_seed": 666, "prompts": []}
        for c in CASES[world]
    ]
    if world == 1:
        ranks = [{c["name"]: worker.run_case(c) for c in cases}]
    else:
        ranks = rank_results(world, "worker.py", cases, tmp_path)
    for described in cases:
        results = [rank[described["name"]] for rank in ranks]
        first = results[0]
        print(world, described["name"], first["preemptions"], "preemptions", first["hits"], "tokens found")
        small = described["options"]["cache_memory"] == SMALL["cache_memory"]
        assert (first["preemptions"] > 0) == small
        assert small or first["hits"] > 0, "each prompt comes twice"
        assert (first["launched_ahead"] > 10) == described["ahead"]
        assert first["tokens"] == [[one["tokens"] for one in alone]]
        assert first["ends"] == [[one["ends"] for one in alone]]
        for actual, one in zip(first["logprobs"][0], alone, strict=True):
            wanted = one["logprobs"]
            assert (actual is None) == (wanted is None)
            if actual is not None:
                assert [list(of) for of in actual] == [list(of) for of in wanted]
                values, expected = ([x for of in them for x in of.values()] for them in (actual, wanted))
                assert values == pytest.approx(expected, abs=1e-3)
        for other in results:
            assert other["pages_lost"] == 0 and other["own_pages_lost"] == 0
            same = ("tokens", "ends", "logprobs", "preemptions", "launched_ahead", "hits")
            assert all(other[key] == first[key] for key in same), "every rank returns the same"


def test_alone_as_transformers_generates(
    model: Any, requests: dict[str, list[Any]], alone: list[dict[str, Any]]
) -> None:
    for number in range(len(LENGTHS)):
        assert alone[number]["tokens"] == model.greedy(requests["prompts"][number], COUNT)
    assert [one["ends"] for one in alone[:-2]] == [("length", None)] * (len(alone) - 2)
    assert alone[-2]["ends"] == ("error", "the model's logits for its next token are not finite (inf or nan)")
    assert alone[-1]["ends"][0] == "error" and alone[-1]["ends"][1].startswith("no token is left to sample")
