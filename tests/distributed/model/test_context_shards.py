"""Logits of ranks that hold contexts together, wherever the pages lie, against one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dsa_engine.demo.random_checkpoint import write_random_checkpoint
from small_config import SMALL

OPTIONS = {"device": "cpu", "max_model_len": 1024, "cache_memory": "4MiB", "page_size": 8, "progress": False}
STEPS = {"lengths": [77, 5, 130, 33, 64], "chunk": 50, "hits": 24, "decodes": 3, "rows": 3}


def case(name: str, cp: int, dcp: int, dispatch: str = "all_to_all", **keys: Any) -> dict[str, Any]:
    parallel = {"cp_size": cp, "dcp_size": dcp, "moe_dispatch": dispatch, "decode_dispatch": dispatch}
    return {"name": name, "parallel": parallel, "options": OPTIONS, "skew": 0.0} | STEPS | keys


CASES = {
    2: [
        case("anywhere", 2, 2),
        case("nearly all on one rank", 2, 2, skew=0.95),
        case("padded", 2, 2, "all_gather", padded=True, skew=0.8),
        case("dense", 2, 2, model_type="deepseek_v3"),
        case("many rows, whose thresholds travel", 2, 2, lengths=[9 + 7 * number for number in range(16)]),
    ],
    4: [case("four", 4, 4), case("two whole copies", 4, 2, skew=0.8), case("two groups", 2, 2, "all_gather")],
}


@pytest.mark.slow
@pytest.mark.parametrize("world", CASES)
def test_logits(
    world: int, rank_results: Callable[..., list[Any]], program: Callable[..., Any], tmp_path: Path
) -> None:
    cases = []
    for one in CASES[world]:
        model_type = one.get("model_type", "deepseek_v32")
        if not (folder := tmp_path / model_type).exists():
            config = SMALL | {"vocab_size": 204, "num_attention_heads": 4, "model_type": model_type}
            write_random_checkpoint(folder, config, fp8=False)
        cases.append(one | {"folder": str(folder)})
    ranks = rank_results(world, "context_worker.py", cases, tmp_path)
    for one in cases:
        expected = program("context_worker.py")["run_case"](one | {"parallel": {}})
        actual: dict[tuple[int, int], torch.Tensor] = {}
        for rank in ranks:
            assert not actual.keys() & rank[one["name"]].keys(), "a row is computed by one rank"
            actual |= rank[one["name"]]
        assert actual.keys() == expected.keys() and len(actual) > 20
        for key, logits in expected.items():
            torch.testing.assert_close(actual[key], logits, rtol=1e-4, atol=1e-5)
