"""Replicas on four processes under skewed routing: what each rank serves, counted exactly, against the plan."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from dsa_engine.demo import demo_config
from dsa_engine.parallel.experts.balance import imbalance
from dsa_engine.parallel.experts.counts import ExpertCounts
from dsa_engine.parallel.experts.traffic import RowBytes, quantized_bytes


def _bytes_between_nodes(*runs: list[dict[str, Any]]) -> None:
    """Bytes that cross are those of the routing: of tokens for each rank of the other node, and for that node.
    To FP8 weights tokens travel as codes and scales; of the last run sums do."""
    config = demo_config()
    hidden, k = config["hidden_size"], config["num_experts_per_tok"]
    numbers, fp8 = RowBytes.of(4 * hidden, k), RowBytes.of(quantized_bytes(hidden), k, 4 * hidden)
    coded = RowBytes.of(4 * hidden, k, quantized=quantized_bytes(hidden))
    rows = zip(runs, (0, 0, 1, 0, 1, 1), (numbers, numbers, numbers, fp8, fp8, coded), strict=True)
    for run, number, row in rows:
        each = row.there + row.back
        assert sum(rank["crossed_bytes"] for rank in run) == sum(rank["crossing"][number] for rank in run) * each


def test_the_busiest_rank_serves_what_the_plan_says(
    fork_ranks: Callable[..., Any], demo_cache: Path, tmp_path: Path
) -> None:
    done = fork_ranks(4, "balance_worker.py", tmp_path)
    assert done.returncode == 0, done.stderr
    ranks = [torch.load(tmp_path / f"rank{rank}.pt") for rank in range(4)]
    before, after, by_node, *fp8, coded = ([rank[run] for rank in ranks] for run in range(6))
    assert all(rank["tokens"] == before[0]["tokens"] for rank in before + after + by_node), "the same tokens"
    assert all(rank["tokens"] == fp8[0][0]["tokens"] for run in fp8 for rank in run)
    assert all(rank["tokens"] == coded[0]["tokens"] for rank in coded)
    _bytes_between_nodes(before, after, by_node, *fp8, coded)
    there, once = [sum(rank["crossing"][number] for rank in fp8[0]) for number in range(2)]
    in_ranks, in_nodes = (sum(rank["crossed_bytes"] for rank in run) for run in fp8)
    print(f"{in_ranks:,} bytes between nodes, by node {in_nodes:,}: {there / once:.3f} times fewer, as planned")
    assert in_ranks * once == in_nodes * there and there > 1.5 * once
    assert len(before[0]["held"]) == 2
    recorded = ExpertCounts.read(tmp_path / "loads.json")
    assert torch.equal(sum(rank["chosen"] for rank in before), torch.tensor(recorded.loads).long()), "ranks added"
    for layer, (in_order, planned) in enumerate(zip(before[0]["held"], after[0]["held"], strict=True)):
        loads, later = (sum(rank["chosen"][layer] for rank in run).tolist() for run in (before, after))
        assert loads == later, "the same routing"
        was, now = ([rank["local_pairs"][layer] for rank in run] for run in (before, after))
        assert sum(was) == sum(now) == sum(loads), "every pair is computed once"
        for local_pairs, run in ((was, before), (now, after)):
            assert local_pairs == [sum(to_rank) for to_rank in zip(*(rank["sent"][layer] for rank in run), strict=True)]
        assert was == [sum(loads[expert] for expert in held) for held in in_order]
        assert all(rank["held"][layer] == planned for rank in after) and [len(held) for held in planned] == [8] * 4
        predicted = imbalance(loads, in_order) / imbalance(loads, planned)
        measured = max(was) / max(now)
        print(f"layer {layer}: {was} → {now}, {measured:.3f} times fewer on the busiest rank, planned {predicted:.3f}")
        # The rows that choose an expert are divided like random ones, with an error of about the root of their number.
        assert predicted > 1.5 and abs(measured / predicted - 1) < 0.05
