"""Expert parallelism with assigned expert choices instead of routed ones."""

from __future__ import annotations

import sys

import torch

from dsa_engine.measure.emulation.assigned_experts import AssignedExperts
from dsa_engine.measure.emulation.stand_ins import stand_in
from dsa_engine.parallel.all_to_all import Arrivals
from dsa_engine.parallel.config import MoeDispatch
from dsa_engine.parallel.dispatch import Arrived, Dispatch
from dsa_engine.parallel.expert_parallel import ExpertParallel
from dsa_engine.parallel.group import Group
from dsa_engine.parallel.placement import ExpertPlacement


class AssignedExpertParallel(ExpertParallel):
    """Replaces the router's experts by assigned ones and keeps its weights. The group may be a real one."""

    def __init__(self, group: Group, placement: ExpertPlacement, assigned: AssignedExperts):
        super().__init__(group, placement)
        self.assigned = assigned

    def to_physical(self, experts: torch.Tensor) -> torch.Tensor:
        count, k = experts.shape
        return self.assigned.own(count, k, experts.device)


class EmulatedExpertParallel(AssignedExpertParallel):
    """Expert parallelism of an emulated rank: the counts and choices of the other ranks are assigned too."""

    def dispatch(
        self,
        tokens: torch.Tensor,
        experts: torch.Tensor,
        weights: torch.Tensor,
        method: MoeDispatch,
        most_tokens: int,
        most_pairs: int = sys.maxsize,
    ) -> Dispatch:
        dispatch = super().dispatch(tokens, experts, weights, method, most_tokens, most_pairs)
        if method == "all_gather":
            return dispatch
        rounds, counted = dispatch.rounds, self.assigned.step.tokens
        return _Assigned(dispatch, stand_in(("rounds", rounds, counted), lambda: self._arriving(rounds)[0]))

    def gathered_choices(self, experts: torch.Tensor, count: int, most_tokens: int) -> torch.Tensor:
        return self.assigned.gathered(count, most_tokens, experts.shape[1], experts.device)

    def exchange_counts(self, sent: torch.Tensor) -> tuple[Arrivals, int]:
        (made_up, _), step = super().exchange_counts(sent), self.assigned.step

        def make() -> tuple[Arrivals, int]:
            choices, receive = step.arriving
            return Arrivals(made_up.send, receive, int((choices >= 0).sum())), step.most_served

        return stand_in(("counts", step.tokens), make)

    def exchange_rounds(self, sent: torch.Tensor) -> list[Arrivals]:
        made_up = super().exchange_rounds(sent)

        def make() -> list[Arrivals]:
            choices, receive = self._arriving(len(made_up))
            return [
                Arrivals(one.send, counts, int((here >= 0).sum()))
                for one, here, counts in zip(made_up, choices, receive, strict=True)
            ]

        return stand_in(("counts of rounds", len(made_up), self.assigned.step.tokens), make)

    def _arriving(self, rounds: int) -> tuple[list[torch.Tensor], list[list[int]]]:
        """The choices ``[R, k]`` of the tokens of each round, and their number per rank: the tokens of a rank are
        divided evenly over the rounds."""
        choices, receive = self.assigned.step.arriving
        if rounds == 1:
            return [choices], [receive]
        parts = [part.tensor_split(rounds) for part in choices.split(receive)]
        by_round = [[part[number] for part in parts] for number in range(rounds)]
        return [torch.cat(one) for one in by_round], [[len(part) for part in one] for one in by_round]


class _Assigned(Dispatch):
    """A dispatch whose arriving tokens have other choices, ``experts`` of each round."""

    def __init__(self, dispatch: Dispatch, experts: list[torch.Tensor]):
        self.rounds = dispatch.rounds
        self._dispatch, self._experts = dispatch, experts

    def arrive(self, number: int) -> Arrived:
        return self._dispatch.arrive(number)._replace(experts=self._experts[number])

    def give_back(self, number: int, sums: torch.Tensor) -> None:
        self._dispatch.give_back(number, sums)

    def combine(self) -> torch.Tensor:
        return self._dispatch.combine()
