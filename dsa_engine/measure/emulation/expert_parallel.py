"""Expert parallelism with assigned choices instead of routed ones."""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch

from dsa_engine.measure.emulation.assigned_experts import AssignedExperts
from dsa_engine.measure.emulation.stand_ins import stand_in
from dsa_engine.parallel.experts import MoeDispatch
from dsa_engine.parallel.experts.all_to_all import RecvPlan
from dsa_engine.parallel.experts.dispatch import Dispatch, Received
from dsa_engine.parallel.experts.expert_parallel import ExpertParallel
from dsa_engine.parallel.experts.placement import ExpertPlacement
from dsa_engine.parallel.group import Group


class AssignedExpertParallel(ExpertParallel):
    """Assigned experts replace the router's, with the router's weights. The group may be a real one."""

    def __init__(self, group: Group, placement: ExpertPlacement, assigned: AssignedExperts):
        super().__init__(group, placement)
        self.assigned = assigned

    def to_physical(self, experts: torch.Tensor) -> torch.Tensor:
        count, k = experts.shape
        return self.assigned.own(count, k, experts.device)


class EmulatedExpertParallel(AssignedExpertParallel):
    """Expert parallelism of an emulated rank: the counts and choices that other ranks would send are assigned too."""

    def dispatch(
        self,
        tokens: torch.Tensor,
        experts: torch.Tensor,
        weights: torch.Tensor,
        method: MoeDispatch,
        max_tokens: int,
        max_pairs: int = sys.maxsize,
        sum_bytes: int | None = None,
    ) -> Dispatch:
        dispatch = super().dispatch(tokens, experts, weights, method, max_tokens, max_pairs, sum_bytes)
        if method == "all_gather":
            return dispatch
        rounds, counted = dispatch.rounds, self.assigned.step.tokens
        return _Assigned(dispatch, stand_in(("rounds", rounds, counted), lambda: self._arriving(rounds)[0]))

    def gather(
        self, tokens: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor, max_tokens: int
    ) -> Callable[[], Received]:
        (count, k), wait = experts.shape, super().gather(tokens, experts, weights, max_tokens)
        return lambda: wait()._replace(experts=self.assigned.gathered(count, max_tokens, k, experts.device))

    def exchange_counts(self, sent: torch.Tensor) -> tuple[RecvPlan, int]:
        (made_up, _), step = super().exchange_counts(sent), self.assigned.step

        def make() -> tuple[RecvPlan, int]:
            choices, receive = step.arriving
            return RecvPlan(made_up.send, receive, int((choices >= 0).sum())), step.max_served

        return stand_in(("counts", step.tokens), make)

    def exchange_rounds(self, sent: torch.Tensor) -> list[RecvPlan]:
        made_up = super().exchange_rounds(sent)

        def make() -> list[RecvPlan]:
            choices, receive = self._arriving(len(made_up))
            return [
                RecvPlan(one.send, counts, int((here >= 0).sum()))
                for one, here, counts in zip(made_up, choices, receive, strict=True)
            ]

        return stand_in(("counts of rounds", len(made_up), self.assigned.step.tokens), make)

    def _arriving(self, rounds: int) -> tuple[list[torch.Tensor], list[list[int]]]:
        """The choices ``[R, k]`` of the tokens that come in each round, and the number of tokens from each rank. The
        tokens of a rank are cut evenly."""
        choices, receive = self.assigned.step.arriving
        if rounds == 1:
            return [choices], [receive]
        parts = [part.tensor_split(rounds) for part in choices.split(receive)]
        by_round = [[part[number] for part in parts] for number in range(rounds)]
        return [torch.cat(one) for one in by_round], [[len(part) for part in one] for one in by_round]


class _Assigned(Dispatch):
    """A dispatch whose received tokens have other choices: ``experts`` of each round."""

    def __init__(self, dispatch: Dispatch, experts: list[torch.Tensor]):
        self._dispatch, self._experts = dispatch, experts

    @property
    def rounds(self) -> int:
        return self._dispatch.rounds

    def receive(self, number: int) -> Received:
        return self._dispatch.receive(number)._replace(experts=self._experts[number])

    def send_back(self, number: int, sums: torch.Tensor) -> None:
        self._dispatch.send_back(number, sums)

    def combine(self) -> torch.Tensor:
        return self._dispatch.combine()
