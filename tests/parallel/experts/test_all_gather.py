"""Rounds of an all-gather: the pairs of a rank in one are bounded, and sums come back to their tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dsa_engine.parallel.experts.all_gather import AllGather, parts_of, tokens_counted_together
from dsa_engine.parallel.experts.dispatch import Routed, StepSizes
from dsa_engine.parallel.experts.placement import ExpertParallel, ExpertPlacement, contiguous
from dsa_engine.parallel.group import Group


@given(st.lists(st.integers(0, 24), min_size=1, max_size=40), st.integers(1, 200), st.integers(1, 8))
def test_parts(local_pairs: list[int], max_pairs: int, together: int) -> None:
    tokens = (len(local_pairs) - 1) * together + 1  # the last number may be of fewer tokens
    parts = parts_of(local_pairs, together, tokens, max_pairs)
    assert parts[0].first == 0 and parts[-1].last == tokens
    assert all(one.last == other.first for one, other in zip(parts, parts[1:], strict=False))
    for first, last, here in parts:
        assert here == sum(local_pairs[first // together : -(-last // together)])
        assert here <= max(max_pairs, *local_pairs)
    assert len(parts) <= 1 + 2 * sum(local_pairs) // max(1, max_pairs)
    if sum(local_pairs) <= max_pairs:
        assert len(parts) == 1


def test_parts_are_alike() -> None:
    assert [part.local_pairs for part in parts_of([1] * 160, 4, 640, 90)] == [81, 79]


@dataclass
class AllRanks(Group):
    """One rank of several that all have the same tokens, and whose experts give nothing back."""

    @property
    def alone(self) -> bool:
        return False

    def _start_gather(self, rows: torch.Tensor, asynchronous: bool, *_: object) -> Callable[[], torch.Tensor]:
        return lambda: rows.repeat(self.size, 1)

    def _start_reduce(self, rows: torch.Tensor, asynchronous: bool) -> Callable[[], torch.Tensor]:
        return lambda: rows.chunk(self.size)[self.index]


@pytest.mark.parametrize("max_pairs", [1, 7, 40, 1000])
@pytest.mark.parametrize("rank", [0, 2])
def test_every_token_is_served_once(rank: int, max_pairs: int) -> None:
    """3 ranks of 4 experts each; most tokens want those of rank 0. 11 tokens, and 2 rows of padding."""
    size, k, count, hidden = 3, 3, 11, 4
    generator = torch.Generator().manual_seed(0)
    tokens, topk_weights = torch.randn(count, hidden, generator=generator), torch.rand(count, k, generator=generator)
    topk_ids = torch.randint(0, 7, (count, k), generator=generator, dtype=torch.int32)
    placement = ExpertPlacement(contiguous(12, size), torch.device("cpu"))
    parallel = ExpertParallel(AllRanks(tuple(range(size)), rank, None), placement)
    dispatch = AllGather().start(parallel, Routed(tokens, topk_ids, topk_weights), StepSizes(count + 2, max_pairs))
    local_pairs = []
    for number in range(dispatch.rounds):
        here = dispatch.receive(number)
        mine = here.local(4) >= 0
        local_pairs.append(int(mine.sum()))
        assert here.local_pairs in (None, local_pairs[-1])
        together = tokens_counted_together(max_pairs, k)
        assert local_pairs[-1] <= max(max_pairs, together * k)
        dispatch.send_back(number, here.tokens * (here.topk_weights * mine).sum(dim=1, keepdim=True))
    mine = topk_ids // 4 == rank
    assert sum(local_pairs) == size * int(mine.sum())
    assert (dispatch.rounds == 1) == (sum(local_pairs) <= max_pairs)
    torch.testing.assert_close(dispatch.combine(), tokens * (topk_weights * mine).sum(dim=1, keepdim=True))
