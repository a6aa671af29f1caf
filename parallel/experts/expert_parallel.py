"""Expert parallelism: every rank of the group holds a part of the routed experts (`placement.py`).

A dispatch (`dispatch.py`) brings tokens to the ranks that hold their experts, each with its choices and weights in one
row (`kernels/moe/pack_tokens.py`), and the sums back. Both dispatches send a token to a rank at most once, even if it
has chosen several of that rank's experts.

* "all_to_all": only what is needed travels, in rounds if much comes to one rank (`all_to_all.py`). The counts depend on
  the routing, and the host waits for them. Sums add in float32, in the order of a token's choices: the same bits each
  time.
* "all_gather": every rank gets every token (`all_gather.py`). The bytes that travel depend on the batch only. Sums add
  in the tokens' dtype, on their way back.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F

from dsa_engine.kernels.moe.pack_tokens import pack_tokens
from dsa_engine.kernels.runtime.transfer import download
from dsa_engine.parallel.experts import MoeDispatch
from dsa_engine.parallel.experts.all_gather import AllGatherDispatch, Part, parts_of, tokens_counted_together
from dsa_engine.parallel.experts.all_to_all import AllToAllDispatch, RecvPlan, SendPlan, in_rounds, rounds_needed
from dsa_engine.parallel.experts.dispatch import Dispatch, NoDispatch, Received, unpacked
from dsa_engine.parallel.experts.placement import ExpertPlacement
from dsa_engine.parallel.group import Group


class ExpertParallel:
    """The experts of a layer, divided over a group; one rank's view.

    Attributes:
        group: the ranks that hold the experts.
        placement: the experts of each rank.
        even: spread choices evenly over the ranks instead of routing them (:meth:`.mesh.Mesh.even_routing`).
    """

    def __init__(self, group: Group, placement: ExpertPlacement):
        self.group = group
        self.placement = placement
        self.even = False

    @property
    def held(self) -> tuple[int, ...]:
        """The logical experts of this rank, in the order of its weights."""
        return self.placement.held[self.group.index]

    def dispatch(
        self,
        tokens: torch.Tensor,
        experts: torch.Tensor,
        weights: torch.Tensor,
        method: MoeDispatch,
        max_tokens: int,
        max_pairs: int = sys.maxsize,
    ) -> Dispatch:
        """Brings each of ``tokens [T, hidden]`` to its ``experts [T, k]``; every rank of the group takes part.

        Args:
            experts: logical experts, int32; −1 is no expert.
            weights: ``[T, k]`` float32.
            method: "all_to_all" or "all_gather".
            max_tokens: the largest token count of a rank of the group.
            max_pairs: bound on the token-expert pairs that a rank serves in a round
                (:func:`.all_to_all.rounds_needed`, :func:`.all_gather.parts_of`). More pairs take several rounds, and
                if there may be more, the host waits for their number.
        """
        experts = self.to_physical(experts)
        if self.group.size == 1:
            return NoDispatch(Received(tokens, experts, weights, 1.0))
        if method == "all_gather":
            return self._all_gather(tokens, experts, weights, max_tokens, max_pairs)
        if method == "all_to_all":
            return self._all_to_all(tokens, experts, weights, max_pairs)
        raise ValueError(f"there is no dispatch {method!r}")

    def to_physical(self, experts: torch.Tensor) -> torch.Tensor:
        """The physical experts ``[T, k]`` that serve this rank's choices of logical ones."""
        if self.even:
            return self.placement.spread(experts, self.group.index * experts.numel())
        return self.placement.to_physical(experts, self.group.index)

    def exchange_counts(self, sent: torch.Tensor) -> tuple[RecvPlan, int]:
        """Tells every rank what comes to it, and the number of choices that the most loaded rank serves. In a dispatch
        of one round, the host waits for nothing else.

        Args:
            sent: int32 ``[size, 2]``, to each rank: tokens, and choices of them that it serves.
        """
        size, index = self.group.size, self.group.index
        all_ranks = self.group.all_gather(sent).view(size, size, 2)  # from, to
        largest = all_ranks[..., 1].sum(dim=0, dtype=torch.int32).amax()
        rows = download(torch.cat((sent, all_ranks[:, index], largest.expand(1, 2))))()
        return _recv_plan(rows[:size], rows[size:-1]), rows[-1][0]

    def exchange_rounds(self, sent: torch.Tensor) -> list[RecvPlan]:
        """The same for every round.

        Args:
            sent: int32 ``[rounds, size, 2]``.
        """
        received = self.group.all_to_all(sent.transpose(0, 1).contiguous()).transpose(0, 1)
        both = download(torch.stack((sent, received), dim=1))()
        return [_recv_plan(*one) for one in both]

    def gather(
        self, tokens: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor, max_tokens: int
    ) -> Callable[[], Received]:
        """Starts to gather the tokens of all ranks, ``max_tokens`` rows of each. Padding has no experts, so no expert
        works on it.

        Returns:
            a function that waits for them.
        """
        group, k = self.group, experts.shape[1]
        wait = group.all_gather_async(pack_tokens(tokens, experts, weights, rows=max_tokens))

        def received() -> Received:
            gathered = unpacked(wait(), tokens, k, self.placement, group.index)
            return Received(*gathered, self.placement.fraction(group.index))

        return received

    def count_served(self, experts: torch.Tensor, together: int) -> list[int]:
        """Number of gathered choices that this rank serves, of each ``together`` tokens; the host waits for it."""
        padded = F.pad(experts, (0, 0, 0, -len(experts) % together), value=-1) if len(experts) % together else experts
        return download((padded.view(-1, together * experts.shape[1]) >= 0).sum(dim=1))()

    def _all_to_all(
        self, tokens: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor, max_pairs: int
    ) -> Dispatch:
        group, k = self.group, experts.shape[1]
        plan = SendPlan.of(experts, self.placement.rank_of, group.size)
        whole, largest = self.exchange_counts(plan.counts)
        rows, rounds = sum(whole.send), rounds_needed(largest, max_pairs, group.size, k)
        if rounds == 1:
            source, choice_rows, plans = plan.order.tokens[:rows], plan.order.pair_rows, [whole]
        else:
            source, choice_rows, counts = in_rounds(plan, rows, rounds)
            plans = self.exchange_rounds(counts)
        return AllToAllDispatch(group, self.placement, tokens, experts, weights, source, choice_rows, plans)

    def _all_gather(
        self,
        tokens: torch.Tensor,
        experts: torch.Tensor,
        weights: torch.Tensor,
        max_tokens: int,
        max_pairs: int,
    ) -> Dispatch:
        group, (count, k) = self.group, experts.shape
        choices = min(k, self.placement.count(group.index))

        def parts(received: Received) -> list[Part]:
            rows = len(received.tokens)
            if rows * choices <= max_pairs:
                return [Part(0, rows, None)]
            together = tokens_counted_together(max_pairs, choices)
            return parts_of(self.count_served(received.experts, together), together, rows, max_pairs)

        return AllGatherDispatch(group, self.gather(tokens, experts, weights, max_tokens), parts, count)


def _recv_plan(sent: list[list[int]], received: list[list[int]]) -> RecvPlan:
    """The sizes of a round from rows and choices to each rank, and from each rank."""
    return RecvPlan([row[0] for row in sent], [row[0] for row in received], sum(row[1] for row in received))
