"""Two meshes in one run of four processes, each on two ranks, with different prompts at the same time."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

OPTIONS = {"device": "cpu", "max_model_len": 1024, "cache_memory": "64MiB"}
GREEDY = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True}


def test_equal_to_single_process(
    fork_ranks: Callable[..., Any],
    worker: SimpleNamespace,
    oracle: Callable[..., Any],
    random_ids: Callable[..., list[int]],
    assert_same_logits: Callable[..., None],
    tmp_path: Path,
) -> None:
    """The parts have different divisions and numbers of steps, so a message that crossed over would be noticed."""
    folder = str(oracle("deepseek_v32").folder)

    def case(ranks: list[int], parallel: dict[str, Any], lengths: list[int], seed: int) -> dict[str, Any]:
        prompts = [random_ids(n, seed=seed + i) for i, n in enumerate(lengths)]
        generate = [{"prompts": prompts, "params": [GREEDY] * len(prompts)}]
        described = {"folder": folder, "ranks": ranks, "parallel": parallel, "options": OPTIONS}
        return described | {"prompts": prompts[:1], "generate": generate}

    cases = [
        case([0, 1], {"tp_size": 2}, [150, 5, 1], seed=1),
        case([2, 3], {"cp_size": 1, "moe_dispatch": "all_gather"}, [301, 33, 64, 2, 9], seed=50),
    ]
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    done = fork_ranks(4, "parts_worker.py", tmp_path / "cases.json", tmp_path)
    assert done.returncode == 0, done.stderr
    for described in cases:
        single = worker.run_case(described | {"parallel": {}})
        results = [torch.load(tmp_path / f"rank{rank}.pt") for rank in described["ranks"]]
        for number, result in enumerate(results):
            assert result["mesh"] == (number, 2, (0, 0))
            assert result["tokens"] == single["tokens"]
            assert result["pages_lost"] == 0
            rank = described["ranks"][number]
            assert result["between_parts"] == ({2: rank, 3: rank} if rank < 2 else {0: 0, 1: 1})
            assert result["experts"] == [6] * len(single["experts"])
            assert_same_logits(result["last"][0][None], single["last"][0][None], what="last")
        assert [r["exchanged"] for r in results] == [[2.0, 4.0, 6.0], [1.0, 2.0, 3.0]]
        assert [r["exchanged_bytes"] for r in results] == [12, 12]
