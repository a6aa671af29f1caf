"""Expert parallelism whose choices are assigned, not routed."""

from __future__ import annotations

import torch

from dsa_engine.measure.emulation.assigned_experts import AssignedExperts
from dsa_engine.parallel.config import MoeDispatch
from dsa_engine.parallel.expert_parallel import Arrivals, Dispatched, ExpertParallel
from dsa_engine.parallel.group import Group
from dsa_engine.parallel.placement import ExpertPlacement


class AssignedExpertParallel(ExpertParallel):
    """Assigned experts take the place of the router's, with its weights. The group may be a real one."""

    def __init__(self, group: Group, placement: ExpertPlacement, assigned: AssignedExperts):
        super().__init__(group, placement)
        self.assigned = assigned

    def to_physical(self, experts: torch.Tensor) -> torch.Tensor:
        count, k = experts.shape
        return self.assigned.own(count, k, experts.device)


class EmulatedExpertParallel(AssignedExpertParallel):
    """Of an emulated rank: what other ranks would have sent, counts and choices, is assigned too."""

    def dispatch(
        self,
        tokens: torch.Tensor,
        experts: torch.Tensor,
        weights: torch.Tensor,
        method: MoeDispatch,
        most_tokens: int,
    ) -> Dispatched:
        here = super().dispatch(tokens, experts, weights, method, most_tokens)
        count, k = experts.shape
        if method == "all_gather":
            return here._replace(experts=self.assigned.gathered(count, most_tokens, k, experts.device))
        return here._replace(experts=self.assigned.arriving().choices)

    def exchange_counts(self, sent: torch.Tensor) -> Arrivals:
        made_up = super().exchange_counts(sent)
        arriving = self.assigned.arriving()
        return Arrivals(made_up.send, arriving.tokens, arriving.served)
