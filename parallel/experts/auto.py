"""The dispatch "auto": in each step the one with the shortest modelled exchange for its size (`traffic.py`)."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from dsa_engine.parallel.experts import DispatchMethod, by_node
from dsa_engine.parallel.experts.all_gather import AllGather
from dsa_engine.parallel.experts.all_to_all import AllToAll
from dsa_engine.parallel.experts.dispatch import (
    Dispatch,
    Dispatcher,
    Memory,
    PrefillSizes,
    Ranks,
    Routed,
    Sends,
    StepSizes,
)
from dsa_engine.parallel.experts.placement import ExpertParallel, has_two_levels
from dsa_engine.parallel.experts.traffic import DispatchChoice, RouterShape, RowBytes


class Auto(Dispatcher):
    """Chooses among ``ways``; of these the last takes the most memory."""

    def __init__(self, choice: DispatchChoice, ways: Mapping[DispatchMethod, Dispatcher], device: torch.device):
        self._choice, self._ways, self._device = choice, ways, device

    def for_decode(self) -> Dispatcher:
        """CUDA graphs need static shapes."""
        return self._ways["all_gather"] if self._device.type == "cuda" else self

    def is_new(self, tokens: int) -> bool:
        return self._choice.is_new(tokens)

    def memory(self, sizes: PrefillSizes) -> Memory:
        return [*self._ways.values()][-1].memory(sizes)

    def start(self, experts: ExpertParallel, routed: Routed, step: StepSizes, unsent: Sends | None = None) -> Dispatch:
        sent, k = routed.tokens.shape[1] * routed.tokens.dtype.itemsize, routed.topk_ids.shape[1]
        row = RowBytes.of(sent, k, step.sum_bytes, experts.quantized_sum_bytes)
        routing = RouterShape(experts.placement.experts, k, experts.groups, experts.top_groups)
        way = self._ways[self._choice.method(step.max_tokens, step.max_pairs, row, routing)]
        return way.start(experts, routed, step, unsent)


def make(mesh: Ranks) -> Dispatcher:
    ways: dict[DispatchMethod, Dispatcher] = {"all_gather": AllGather(), "all_to_all": AllToAll()}
    if has_two_levels(mesh.nodes):
        ways["by_node"] = by_node.make(mesh)
    return Auto(DispatchChoice(mesh.nodes, logs=mesh.is_leader), ways, mesh.device)
