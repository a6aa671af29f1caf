"""Expert parallelism of an emulated rank: tokens of all ranks choose experts evenly."""

from __future__ import annotations

from collections.abc import Callable

import torch

from dsa_engine.kernels.runtime.transfer import download
from dsa_engine.parallel.experts.all_to_all import RecvPlan
from dsa_engine.parallel.experts.choose_dispatch import DispatchChoice
from dsa_engine.parallel.experts.dispatch import Dispatch, Received
from dsa_engine.parallel.experts.expert_parallel import ExpertParallel
from dsa_engine.parallel.experts.placement import ExpertPlacement
from dsa_engine.parallel.group import Group


class EmulatedExpertParallel(ExpertParallel):
    """This rank's pairs are spread over all ranks, and those that come to it over its experts. Every rank has as many
    tokens as this one, and sends it as many as it gets from it."""

    def __init__(self, group: Group, placement: ExpertPlacement, choice: DispatchChoice | None = None):
        super().__init__(group, placement, choice=choice)
        self.even = True

    def _gather(
        self, tokens: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, max_tokens: int, by_rail: bool
    ) -> Callable[[], Received]:
        wait = super()._gather(tokens, topk_ids, topk_weights, max_tokens, by_rail)

        def received() -> Received:
            copies = wait()
            return copies._replace(topk_ids=self.placement.spread(copies.topk_ids))

        return received

    def _counts(self, sent: torch.Tensor) -> tuple[RecvPlan, int]:
        self.group.all_gather(sent)
        rows = download(sent)()
        plan = RecvPlan.of(rows, rows)
        return plan, plan.local_pairs

    def _all_to_all(
        self, tokens: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, max_pairs: int
    ) -> Dispatch:
        return _Dealt(super()._all_to_all(tokens, topk_ids, topk_weights, max_pairs), len(self.held))


class _Dealt(Dispatch):
    """A dispatch whose received tokens choose this rank's ``held`` experts one after the other."""

    def __init__(self, dispatch: Dispatch, held: int):
        self._dispatch, self._held, self._pairs = dispatch, held, 0

    @property
    def rounds(self) -> int:
        return self._dispatch.rounds

    def receive(self, number: int) -> Received:
        received = self._dispatch.receive(number)
        topk_ids = torch.full_like(received.topk_ids, -1)
        rows, pairs = max(1, len(topk_ids)), torch.arange(received.local_pairs or 0, device=topk_ids.device)
        column = pairs // rows
        topk_ids[pairs % rows, column] = ((self._pairs + pairs + column) % self._held).to(topk_ids.dtype)
        self._pairs += len(pairs)
        return received._replace(topk_ids=topk_ids, first=None)

    def send_back(self, number: int, sums: torch.Tensor) -> None:
        self._dispatch.send_back(number, sums)

    def combine(self) -> torch.Tensor:
        return self._dispatch.combine()
