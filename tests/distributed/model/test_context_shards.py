"""Logits of ranks that hold contexts together, wherever the pages lie, against one process."""

from __future__ import annotations

import json
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
        case("some spilled", 2, 2, resident=60, spilled=90, skew=0.6, least=5),
        case("some spilled, whole copies", 2, 1, resident=60, spilled=90, least=5),
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
        expected = program("context_worker.py")["run_case"](one | {"parallel": {}, "spilled": 0})
        actual: dict[tuple[int, int], torch.Tensor] = {}
        for rank in ranks:
            assert not actual.keys() & rank[one["name"]].keys(), "a row is computed by one rank"
            actual |= rank[one["name"]]
        assert actual.keys() == expected.keys() and len(actual) >= one.get("least", 21)
        for key, logits in expected.items():
            torch.testing.assert_close(actual[key], logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("cached", ["auto", "fp8"])
def test_prefill_with_spilled_pages(cached: str, program: Callable[..., Any], tmp_path: Path) -> None:
    """The bits of one with all pages on the device, of the model and of its MTP modules; pages of both kinds, also
    those that a chunk goes on to fill, and those that two requests begin with."""
    sizes = {
        "vocab_size": 204,
        "kv_lora_rank": 128,
        "qk_rope_head_dim": 16,
        "index_head_dim": 16,
        "num_attention_heads": 4,
    }
    (tmp_path / "config.json").write_text(json.dumps(SMALL | sizes | {"num_nextn_predict_layers": 1}))
    drafts = {"method": "mtp", "num_speculative_tokens": 1}
    options = OPTIONS | {"load_format": "dummy", "kv_cache_dtype": cached, "speculative_config": drafts}
    one = case(cached, 1, 1, folder=str(tmp_path), decodes=0, options=options) | {"parallel": {}}
    run_case = program("context_worker.py")["run_case"]
    expected, actual = run_case(one), run_case(one | {"resident": 9, "spilled": 90})
    assert actual.keys() == expected.keys() and len(actual) > 10
    for key, rows in expected.items():
        assert torch.equal(actual[key], rows), key
