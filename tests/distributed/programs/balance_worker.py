"""Skewed routing with experts in order, then with replicas by the loads that were counted, then so by node; then in
order and by node with FP8 weights, and by node with sums that come back in FP8: balance_worker.py FOLDER.

Every rank stores, of all runs: the tokens of all requests, and in each layer the logical experts that its own tokens
chose and how many of these pairs each rank must compute, the number of pairs that it computed, and the experts of all
ranks; the number of ranks on the other node and of other nodes that its tokens must reach, and the bytes that it
sent there.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from collectives import record
from dsa_engine import LLM, ParallelConfig, SamplingParams
from dsa_engine.model.moe import MoE
from dsa_engine.parallel import Mesh
from dsa_engine.parallel.experts.dispatch import Dispatch, Received, Routed
from dsa_engine.parallel.experts.placement import ExpertParallel

NODES = [0, 0, 1, 1]
PROMPTS = [[5 + (7 * i * n + i * i) % 300 for i in range(n)] for n in (250, 333, 40, 9)]


class Counted:
    """Stands for the dispatcher and the experts of a layer, and counts."""

    def __init__(self, layer: MoE):
        self.parallel, self.experts = layer.expert_parallel, layer.experts
        self.dispatcher, self.product = layer.dispatchers[False], self.experts.product
        self.takes_words = self.dispatcher.takes_words
        self.chosen = torch.zeros(len(layer.router.bias), dtype=torch.int64)
        self.local_pairs = 0
        self.sent = [0] * self.parallel.group.size
        self.crossing = [0, 0]
        layer.dispatchers, layer.experts = (self, self), self  # type: ignore[assignment]

    def start(self, parallel: ExpertParallel, routed: Routed, *more: Any) -> Dispatch:
        self.chosen += routed.topk_ids[routed.topk_ids >= 0].bincount(minlength=len(self.chosen))
        self._predict(routed.topk_ids.tolist())
        return self.dispatcher.start(parallel, routed, *more)

    def _predict(self, rows: list[list[int]]) -> None:
        """The rank of each pair by the formula of choose_replicas, in floating point."""
        replicas, rank_of = self.parallel.placement.replicas(), self.parallel.placement.rank_of.tolist()
        for number, row in enumerate(rows, self.parallel.group.index):
            owns = [replicas[expert] for expert in row if expert >= 0]
            ranks = [rank_of[own[int(number * 2**0.5 % 1 * len(own))]] for own in owns]
            for rank in ranks:
                self.sent[rank] += 1
            away = [rank for rank in set(ranks) if NODES[rank] != NODES[self.parallel.group.index]]
            self.crossing[0] += len(away)
            self.crossing[1] += bool(away)

    def __call__(self, received: Received, uncounted_bytes: int) -> torch.Tensor:
        self.local_pairs += int((received.local(self.experts.count) >= 0).sum())
        return self.experts(received, uncounted_bytes)


def run(quantization: str | None = None, **options: Any) -> tuple[LLM, dict[str, Any]]:
    parallel = ParallelConfig(**{"decode_dispatch": "all_to_all"} | options)
    common: dict[str, Any] = {"device": "cpu", "cache_memory": "32MiB", "max_model_len": 1024, "progress": False}
    fewer = {"num_hidden_layers": 3, "num_nextn_predict_layers": 0}
    with patch.object(Mesh, "_exchange_nodes", lambda _: NODES):
        common |= {"load_format": "dummy", "hf_overrides": fewer, "quantization": quantization}
        llm = LLM("demo-random", parallel=parallel, **common)
    mesh, counted = llm.engine.mesh, []
    log = record(mesh.node_groups.rail if mesh.node_groups else mesh.ep)
    for layer in llm.engine.model.layers:
        if layer.moe is not None:
            bias = layer.moe.router.bias  # it chooses experts and does not weigh them
            with torch.inference_mode():
                bias += (torch.arange(len(bias)) * 5 % len(bias) / len(bias)) ** 3
            counted.append(Counted(layer.moe))
    outs = llm.generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True))
    tokens_and_sums = [one for one in log if one.kind == "all_to_all" and one.asynchronous]
    return llm, {
        "tokens": [out.token_ids for out in outs],
        "chosen": torch.stack([one.chosen for one in counted]),
        "local_pairs": [one.local_pairs for one in counted],
        "sent": [one.sent for one in counted],
        "crossing": torch.tensor([one.crossing for one in counted]).sum(dim=0).tolist(),
        "crossed_bytes": sum(
            n
            for one in tokens_and_sums
            for to, n in zip(one.ranks, one.sent, strict=True)
            if NODES[to] != NODES[mesh.rank]
        ),
        "held": [one.parallel.placement.held for one in counted],
    }


def main() -> None:
    folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    path = folder / "loads.json"
    llm, first = run(record_expert_loads=path)
    llm.close()
    torch.distributed.barrier()  # rank 0 has written the file
    _, second = run(expert_loads=path, redundant_experts=8)
    by_node = {"moe_dispatch": "by_node", "decode_dispatch": "by_node"}
    _, third = run(expert_loads=path, redundant_experts=8, **by_node)
    fp8 = [run("fp8", **chosen)[1] for chosen in ({}, by_node)]
    _, coded = run(moe_combine_dtype="fp8", **by_node)
    torch.save([first, second, third, *fp8, coded], folder / f"rank{rank}.pt")


if __name__ == "__main__":
    main()
