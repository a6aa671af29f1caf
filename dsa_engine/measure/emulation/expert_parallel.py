"""Expert parallelism with assigned choices instead of routed ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

import torch

from dsa_engine.measure.emulation.assigned_experts import AssignedExperts
from dsa_engine.measure.emulation.stand_ins import stand_in
from dsa_engine.measure.emulation.two_levels import AllPeers, Arriving, StepInTwoLevels, plans
from dsa_engine.parallel.experts.all_to_all import RecvPlan
from dsa_engine.parallel.experts.by_machine import MachineGroups, Way
from dsa_engine.parallel.experts.choose_dispatch import DispatchChoice
from dsa_engine.parallel.experts.dispatch import Dispatch, Received
from dsa_engine.parallel.experts.expert_parallel import ExpertParallel
from dsa_engine.parallel.experts.placement import ExpertPlacement
from dsa_engine.parallel.group import Group


class AssignedExpertParallel(ExpertParallel):
    """Assigned experts replace the router's, with the router's weights. The group may be a real one."""

    def __init__(
        self,
        group: Group,
        placement: ExpertPlacement,
        assigned: AssignedExperts,
        machines: MachineGroups | None = None,
        choice: DispatchChoice | None = None,
    ):
        super().__init__(group, placement, machines, choice)
        self.assigned = assigned

    def to_physical(self, experts: torch.Tensor) -> torch.Tensor:
        count, k = experts.shape
        return self.assigned.own(count, k, experts.device)

    @property
    def choosing(self) -> None:
        return None


class EmulatedExpertParallel(AssignedExpertParallel):
    """Expert parallelism of an emulated rank: the counts and choices that other ranks would send are assigned too."""

    _two_levels: StepInTwoLevels | None = None  # those of the step before this dispatch
    _passed_on: Sequence[Arriving] = ()  # in the rounds inside the machine that follow one along the rail

    def gather(
        self, tokens: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor, max_tokens: int, by_rail: bool
    ) -> Callable[[], Received]:
        (count, k), wait = experts.shape, super().gather(tokens, experts, weights, max_tokens, by_rail)
        return lambda: _assigned(wait(), self.assigned.gathered(count, max_tokens, k, experts.device))

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

    def exchange_ways(self, sent: torch.Tensor, groups: MachineGroups, takers: torch.Tensor) -> list[Way]:
        super().exchange_ways(sent, groups, takers)
        step, rounds = self._in_two_levels(), len(sent)
        return stand_in(("ways", rounds, step.step.tokens), lambda: step.ways(rounds))

    def exchange_inside(self, sent: torch.Tensor, machine: Group) -> list[RecvPlan]:
        return plans(super().exchange_inside(sent, machine), self._passed_on)

    def _all_to_all(
        self, tokens: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor, max_pairs: int
    ) -> Dispatch:
        dispatch = super()._all_to_all(tokens, experts, weights, max_pairs)
        rounds, counted = dispatch.rounds, self.assigned.step.tokens
        return _Assigned(dispatch, stand_in(("rounds", rounds, counted), lambda: self._arriving(rounds)[0]))

    def _on_two_levels(
        self,
        groups: MachineGroups,
        rail: Callable[[], Dispatch],
        inside: Callable[[int, Received], Dispatch],
        rounds: Sequence[int],
    ) -> Dispatch:
        step, outer = self._in_two_levels(), len(rounds)

        def make() -> tuple[list[torch.Tensor], list[list[Arriving]]]:
            along = [step.taken(step.step.rank, number, outer) for number in range(outer)]
            return along, [step.inside(number, outer, inner) for number, inner in enumerate(rounds)]

        along, passed_on = stand_in(("two levels", *rounds, step.step.tokens), make)

        def pass_on(number: int, brought: Received) -> Dispatch:
            self._passed_on = passed_on[number]
            return _Assigned(inside(number, brought), [one.choices for one in passed_on[number]])

        return super()._on_two_levels(groups, lambda: _Assigned(rail(), along), pass_on, rounds)

    @cached_property
    def _peers(self) -> AllPeers:
        assert self.machines is not None, "there are machines"
        return AllPeers(self.machines, self.placement)

    def _in_two_levels(self) -> StepInTwoLevels:
        step = self.assigned.step
        if self._two_levels is None or self._two_levels.step is not step:
            self._two_levels = StepInTwoLevels(step, self._peers)
        return self._two_levels

    def _arriving(self, rounds: int) -> tuple[list[torch.Tensor], list[list[int]]]:
        """The choices ``[R, k]`` of the tokens that come in each round, and the number of tokens from each rank. The
        tokens of a rank are cut evenly."""
        choices, receive = self.assigned.step.arriving
        if rounds == 1:
            return [choices], [receive]
        parts = [part.tensor_split(rounds) for part in choices.split(receive)]
        by_round = [[part[number] for part in parts] for number in range(rounds)]
        return [torch.cat(one) for one in by_round], [[len(part) for part in one] for one in by_round]


def _assigned(received: Received, experts: torch.Tensor) -> Received:
    """The same tokens with other choices, counted within this rank's experts."""
    return received._replace(experts=experts, first=None)


class _Assigned(Dispatch):
    """A dispatch whose received tokens have other choices: ``experts`` of each round."""

    def __init__(self, dispatch: Dispatch, experts: list[torch.Tensor]):
        self._dispatch, self._experts = dispatch, experts

    @property
    def rounds(self) -> int:
        return self._dispatch.rounds

    def receive(self, number: int) -> Received:
        return _assigned(self._dispatch.receive(number), self._experts[number])

    def send_back(self, number: int, sums: torch.Tensor) -> None:
        self._dispatch.send_back(number, sums)

    def combine(self) -> torch.Tensor:
        return self._dispatch.combine()
