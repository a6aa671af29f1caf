"""The order in which ranks of two parts of a run connect."""

from __future__ import annotations

from collections import Counter

import pytest

from dsa_engine.parallel.disaggregation import pairs_in_rounds


@pytest.mark.parametrize(("prefill", "decode"), [(1, 1), (1, 5), (5, 1), (2, 3), (3, 2), (8, 8), (64, 64)])
def test_every_pair_once_and_no_rank_waits_for_a_pair_that_is_not_its_own(prefill: int, decode: int) -> None:
    """With one unit of time a pair, all have connected when the busiest rank has gone through its own pairs."""
    senders, receivers = range(prefill), range(prefill, prefill + decode)
    pairs = list(pairs_in_rounds(senders, receivers))
    assert sorted(pairs) == [(sender, receiver) for sender in senders for receiver in receivers]
    free_at: Counter[int] = Counter()
    for pair in pairs:
        end = 1 + max(free_at[rank] for rank in pair)
        free_at.update({rank: end - free_at[rank] for rank in pair})
    assert max(free_at.values()) == max(prefill, decode)
