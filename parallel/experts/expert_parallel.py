"""Expert parallelism: every rank of the group holds a part of the routed experts (`placement.py`).

A dispatch (`dispatch.py`) brings tokens to the ranks that hold their experts, each with its choices and weights in one
row (`kernels/moe/pack_tokens.py`), and the sums back. Both dispatches send a token to a rank at most once, however
many of that rank's experts it has chosen.

* "all_to_all": only what is needed travels, in rounds where much comes to one rank (`all_to_all.py`); the counts depend
  on the routing, and the host waits for them; sums add in float32, in the order of a token's choices, so the same bits
  each time.
* "all_gather": every rank gets every token (`all_gather.py`); what travels depends on the batch only; sums add in the
  tokens' dtype, under way.
"""

from __future__ import annotations

import sys

import torch
import torch.nn.functional as F

from dsa_engine.kernels.moe.pack_tokens import pack_tokens
from dsa_engine.kernels.runtime.transfer import download
from dsa_engine.parallel.experts.all_gather import AllGatherDispatch, Part, parts_of, tokens_counted_together
from dsa_engine.parallel.experts.all_to_all import AllToAllDispatch, RecvPlan, SendPlan, in_rounds, rounds_needed
from dsa_engine.parallel.experts.dispatch import Dispatch, MoeDispatch, Received, SingleRound, unpacked
from dsa_engine.parallel.experts.placement import ExpertPlacement
from dsa_engine.parallel.group import Group


class ExpertParallel:
    """The experts of a model, divided over a group; one rank's view.

    Attributes:
        group: the ranks that hold them.
        placement: which of them each rank holds.
        even: choices are spread over the ranks evenly, whatever they are.
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
        most_tokens: int,
        most_pairs: int = sys.maxsize,
    ) -> Dispatch:
        """Brings each of ``tokens [T, hidden]`` to its ``experts [T, k]``; every rank of the group takes part.

        Args:
            experts: logical experts, int32; −1 is nobody.
            weights: ``[T, k]`` float32.
            method: "all_to_all" or "all_gather".
            most_tokens: the largest token count of a rank of the group.
            most_pairs: token-expert pairs that a rank serves in a round, at most (:func:`.all_to_all.rounds_needed`,
                :func:`.all_gather.parts_of`); more take several rounds, and where there may be more the host waits.
        """
        experts = self.to_physical(experts)
        if self.group.size == 1:
            return SingleRound(Received(tokens, experts, weights, 1.0), lambda sums: sums)
        if method == "all_gather":
            return self._all_gather(tokens, experts, weights, most_tokens, most_pairs)
        if method == "all_to_all":
            return self._all_to_all(tokens, experts, weights, most_pairs)
        raise ValueError(f"there is no dispatch {method!r}")

    def to_physical(self, experts: torch.Tensor) -> torch.Tensor:
        """The physical experts ``[T, k]`` that serve this rank's choices of logical ones."""
        if self.even:
            return self.placement.spread(experts, self.group.index * experts.numel())
        return self.placement.to_physical(experts)

    def exchange_counts(self, sent: torch.Tensor) -> tuple[RecvPlan, int]:
        """Tells every rank what comes to it, and how many choices the rank serves that has most: the one thing in a
        dispatch of one round that the host waits for.

        Args:
            sent: int32 ``[size, 2]``, to each rank: tokens, and choices of them that it serves.
        """
        size, index = self.group.size, self.group.index
        everybodys = self.group.all_gather(sent).view(size, size, 2)  # from, to
        most = everybodys[..., 1].sum(dim=0, dtype=torch.int32).amax()
        rows = download(torch.cat((sent, everybodys[:, index], most.expand(1, 2))))()
        return _arrivals(rows[:size], rows[size:-1]), rows[-1][0]

    def exchange_rounds(self, sent: torch.Tensor) -> list[RecvPlan]:
        """The same for every round.

        Args:
            sent: int32 ``[rounds, size, 2]``.
        """
        received = self.group.all_to_all(sent.transpose(0, 1).contiguous()).transpose(0, 1)
        both = download(torch.stack((sent, received), dim=1))()
        return [_arrivals(*one) for one in both]

    def _all_to_all(
        self, tokens: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor, most_pairs: int
    ) -> Dispatch:
        group, k = self.group, experts.shape[1]
        sendings = SendPlan.of(experts, self.placement.rank_of, group.size)
        whole, most = self.exchange_counts(sendings.counts)
        rows, rounds = sum(whole.send), rounds_needed(most, most_pairs, group.size, k)
        if rounds == 1:
            source, places, arrivals = sendings.order.tokens[:rows], sendings.order.pair_rows, [whole]
        else:
            source, places, counts = in_rounds(sendings, rows, rounds)
            arrivals = self.exchange_rounds(counts)
        return AllToAllDispatch(group, self.placement, tokens, experts, weights, source, places, arrivals)

    def gathered_choices(self, experts: torch.Tensor, count: int, most_tokens: int) -> torch.Tensor:
        """The choices ``[size · most_tokens, k]`` of all ranks' tokens, counted within this rank's experts. This rank
        has ``count`` tokens."""
        return experts

    def count_served(self, experts: torch.Tensor, together: int) -> list[int]:
        """How many of the gathered choices are served here, of each ``together`` tokens; the host waits for it."""
        padded = F.pad(experts, (0, 0, 0, -len(experts) % together), value=-1) if len(experts) % together else experts
        return download((padded.view(-1, together * experts.shape[1]) >= 0).sum(dim=1))()

    def _all_gather(
        self,
        tokens: torch.Tensor,
        experts: torch.Tensor,
        weights: torch.Tensor,
        most_tokens: int,
        most_pairs: int,
    ) -> Dispatch:
        """Padding has no experts, so it takes no part in any expert's work."""
        group, (count, k) = self.group, experts.shape
        gathered = group.all_gather(pack_tokens(tokens, experts, weights, rows=most_tokens))
        arrived = Received(
            *unpacked(gathered, tokens, k, self.placement, group.index), self.placement.fraction(group.index)
        )
        arrived = arrived._replace(experts=self.gathered_choices(arrived.experts, count, most_tokens))
        rows, choices = len(arrived.tokens), min(k, self.placement.count(group.index))
        parts = [Part(0, rows, None)]
        if rows * choices > most_pairs:
            together = tokens_counted_together(most_pairs, choices)
            parts = parts_of(self.count_served(arrived.experts, together), together, rows, most_pairs)
        return AllGatherDispatch(arrived, parts, lambda sums: group.reduce_scatter(sums)[:count])


def _arrivals(sent: list[list[int]], received: list[list[int]]) -> RecvPlan:
    """Of rows and choices, to each rank and from each."""
    return RecvPlan([row[0] for row in sent], [row[0] for row in received], sum(row[1] for row in received))
