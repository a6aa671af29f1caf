"""The all-to-all dispatch: only what is needed travels, in as many rounds as keep a rank's memory bounded.

A token travels once to each rank that holds some of its experts. The number of tokens that come to a rank depends on
the routing; under skewed routing, nearly all tokens of all ranks may choose the same expert. So the ranks tell each
other how many token-expert pairs each of them has to compute. If the most loaded rank has more than fit at a time, all
ranks send in rounds: skew costs time and not memory. A rank's own sums come back one by one and are added at the end,
in the order of a token's pairs: the same bits, for any number of rounds.

With ``quantized_sums`` (a quantized combine) the sending rank quantises its sums once, to codes in e4m3 with a scale
for each 128, a power of two. They are added in float32 as before.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import torch

from dsa_engine.kernels.formats.quantize import quantize_tokens
from dsa_engine.kernels.moe.combine import combine as weighted_sum
from dsa_engine.kernels.moe.combine_codes import combine_codes
from dsa_engine.kernels.moe.pack_tokens import pack_tokens, unpacked
from dsa_engine.kernels.moe.token_ranks import TokenRanks, token_ranks
from dsa_engine.kernels.runtime.integers import cdiv
from dsa_engine.kernels.runtime.kernel import this_thread
from dsa_engine.parallel.experts.dispatch import (
    CountedDispatcher,
    Dispatch,
    Dispatcher,
    Memory,
    PrefillSizes,
    Ranks,
    Received,
    Routed,
    StepSizes,
)
from dsa_engine.parallel.experts.placement import ExpertParallel, RecvPlan
from dsa_engine.parallel.group import Group


class Rounds(NamedTuple):
    """The rows in the order in which they travel: by round, then by rank, then by token."""

    source: torch.Tensor  # [rows] the token of each row
    pair_rows: torch.Tensor  # [T, k] int32: the row of each pair that is its token's first for the rank, −1 of others
    counts: torch.Tensor  # [rounds, size, 2] int32


def rounds_needed(pairs: int, max_pairs: int, size: int, k: int) -> int:
    """Number of rounds that keep the most loaded rank, with ``pairs``, at ``max_pairs`` token-expert pairs a round, or
    at ``size · (k + 1)`` if that is more: rows from rank to rank are cut evenly, up to one pair and the other pairs of
    its token."""
    if pairs <= max_pairs:
        return 1
    return cdiv(pairs, max(size, max_pairs - size * k))


def in_rounds(plan: TokenRanks, rows: int, rounds: int) -> Rounds:
    """Cuts the ``rows`` rows to each rank into ``rounds`` parts with about as many pairs each."""
    tokens, row_ends, pair_rows, ranks, counts = plan
    assert counts is not None
    size, device = len(counts), ranks.device
    source = tokens[:rows]
    rank = torch.searchsorted(row_ends, torch.arange(rows, dtype=torch.int32, device=device), right=True)
    row_pairs = (ranks[source] == rank[:, None]).sum(dim=1)
    rank_pairs = counts[:, 1].long()
    # Pairs of its rank before a row's.
    before = row_pairs.cumsum(0) - row_pairs - (rank_pairs.cumsum(0) - rank_pairs)[rank]
    number = before * rounds // rank_pairs[rank].clamp(min=1)
    by_round = number.argsort(stable=True)
    moved = torch.empty_like(by_round).scatter_(0, by_round, torch.arange(rows, device=device)).int()
    if rows:
        pair_rows = moved[pair_rows.clamp(min=0)].masked_fill_(pair_rows < 0, -1)
    each = torch.zeros(rounds * size, 2, dtype=torch.int32, device=device)
    values = torch.stack((torch.ones_like(row_pairs), row_pairs), dim=1).int()
    each.scatter_add_(0, (number * size + rank)[:, None].expand(rows, 2), values)
    return Rounds(source[by_round], pair_rows, each.view(rounds, size, 2))


class AllToAll(CountedDispatcher):
    def count(self, experts: ExpertParallel, routed: Routed, step: StepSizes) -> Callable[[], Dispatch]:
        plan = token_ranks(routed.topk_ids, experts.placement.rank_of, experts.group.size)
        assert plan.counts is not None
        counted: Callable[[], Dispatch] = this_thread.as_one(
            partial, _counted, experts, routed, step, plan, experts.counts(plan.counts)
        )
        return counted

    def memory(self, sizes: PrefillSizes) -> Memory:
        """A further pair brings at most a token and a sum of its own, beside its rows between the products."""
        chunk, (ranks, k) = sizes.chunk or 0, (sizes.ranks, sizes.k)
        rounds = rounds_needed(sizes.pairs, chunk or sizes.pairs, ranks, k)
        return Memory(sizes.tokens * min(ranks, k) * sizes.back, max(chunk, ranks * (k + 1)), rounds, rows=4)


def _counted(
    experts: ExpertParallel, routed: Routed, step: StepSizes, plan: TokenRanks, wait: Callable[[], tuple[RecvPlan, int]]
) -> Dispatch:  # fmt: skip
    whole, largest = wait()
    rounds = rounds_needed(largest, step.max_pairs, experts.group.size, routed.topk_ids.shape[1])
    quantized = experts.quantized_sum_bytes is not None
    return send_in_rounds(experts.group, experts, routed, plan, whole, rounds, quantized)


def make(mesh: Ranks) -> Dispatcher:
    return AllToAll()


def send_in_rounds(
    group: Group,
    experts: ExpertParallel,
    routed: Routed,
    plan: TokenRanks,
    whole: RecvPlan,
    rounds: int,
    quantized_sums: bool = False,
) -> AllToAllDispatch:
    """Sends the tokens of a plan whose sizes are ``whole``; in more rounds than one, ranks tell each other those of
    each."""
    rows = sum(whole.send)
    if rounds == 1:
        source, pair_rows, plans = plan.tokens[:rows], plan.pair_rows, [whole]
    else:
        source, pair_rows, counts = in_rounds(plan, rows, rounds)
        plans = experts.plans(group, counts)
    return AllToAllDispatch(group, experts, routed, source, pair_rows, plans, quantized_sums)


class AllToAllDispatch(Dispatch):
    """Tokens with physical experts on their way to the ranks of a group, by ``plans``, the sizes of each round, and
    back; for ``source`` and ``pair_rows`` see :class:`Rounds`."""

    rounds = 1

    def __init__(
        self,
        group: Group,
        experts: ExpertParallel,
        routed: Routed,
        source: torch.Tensor,
        pair_rows: torch.Tensor,
        plans: list[RecvPlan],
        quantized_sums: bool,
    ):
        self._group, self._experts, self._routed = group, experts, routed
        self._source, self._pair_rows = source, pair_rows
        self._plans, self._quantized_sums = plans, quantized_sums
        self._returned: torch.Tensor | None = None  # [rows, hidden or words]: at most k rows a token, under any routing
        self.rounds = len(plans)
        sends, *_ = zip(*plans, strict=True)
        self._first = [0, *accumulate(map(sum, sends))]  # first row of each round
        self._returning: Callable[[], None] | None = None
        self._start(0)

    def receive(self, number: int) -> Received:
        if self._returning is not None:
            self._returning()  # it began before this round's tokens; its sums are freed
        wait, packed = self._coming
        del self._coming
        wait()
        k, pairs = self._routed.topk_ids.shape[1], self._plans[number].local_pairs
        tokens, topk_ids, topk_weights = unpacked(packed, self._routed.tokens, k)
        topk_ids, first = self._experts.received(topk_ids, pairs)
        return Received(tokens, topk_ids, topk_weights, 1.0, pairs, first)  # the pairs are known

    def send_back(self, number: int, sums: torch.Tensor) -> None:
        send, receive, _ = self._plans[number]
        self._hidden, self._dtype = sums.shape[1], sums.dtype
        if self._quantized_sums:
            sums = quantize_tokens(sums, power_of_two=True)
        if self._returned is None:
            self._returned = sums.new_empty(self._source.shape[0], sums.shape[1])
        into = self._returned[self._first[number] : self._first[number + 1]]
        self._returning = self._group.all_to_all_async(sums.contiguous(), into, receive, send)
        if number + 1 < self.rounds:
            self._start(number + 1)

    def combine(self) -> torch.Tensor:
        assert self._returned is not None and self._returning is not None
        self._returning()
        if self._quantized_sums:
            return combine_codes(self._returned, self._pair_rows, self._hidden, self._dtype)
        return weighted_sum(self._returned, self._pair_rows)

    def _start(self, number: int) -> None:
        send, receive, _ = self._plans[number]
        source = self._source[self._first[number] : self._first[number + 1]]
        packed = pack_tokens(*self._routed, source=source)
        into = packed.new_empty(sum(receive), packed.shape[1])
        self._coming = self._group.all_to_all_async(packed, into, send, receive), into
