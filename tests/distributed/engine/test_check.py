"""``dsa-engine check`` on ranks that hold contexts together."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from oracles import Oracle

OPTIONS = {"device": "cpu", "progress": False, "max_model_len": 128, "cache_memory": "4MiB", "page_size": 8}
OPTIONS |= {"enforce_eager": True}


@pytest.mark.parametrize(("world", "dcp"), [(2, 2), pytest.param(4, 2, marks=pytest.mark.slow)])
def test_a_selection_of_several_ranks(
    world: int, dcp: int, rank_results: Callable[..., list[Any]], oracle: Callable[..., Oracle], tmp_path: Path
) -> None:
    """It passes; and names the layer where one of the ranks selects one other token."""
    parallel = {"cp_size": world, "dcp_size": dcp}
    cases = [{"name": "one", "folder": str(oracle("deepseek_v32").folder), "parallel": parallel, "options": OPTIONS}]
    for rank in rank_results(world, "check_worker.py", cases, tmp_path, timeout=60):
        sound, faulty = rank["one"]
        assert {one["check"] for one in sound if one["ok"]} >= {"tensors", "sparsity", "layer 1"}, sound
        assert not [one for one in sound if one["ok"] is False], sound
        (wrong,) = [one for one in faulty if one["ok"] is False]
        assert wrong["check"] == "layer 1" and "prefill: selection: 64 tokens, index_topk is 64" in wrong["seen"]
