"""Rounds of an all-to-all: the pairs of each rank in one are bounded, and every token comes back to its place."""

from __future__ import annotations

import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dsa_engine.kernels.moe.combine import combine
from dsa_engine.kernels.moe.token_ranks import token_ranks
from dsa_engine.parallel.experts.all_to_all import AllToAll, in_rounds, rounds_needed
from dsa_engine.parallel.experts.dispatch import Routed, StepSizes
from dsa_engine.parallel.experts.placement import ExpertParallel, ExpertPlacement, contiguous
from dsa_engine.parallel.group import Group
from gloo_ranks import on_ranks


def random_ids(tokens: int, k: int, size: int, hot: float, seed: int) -> torch.Tensor:
    """Random experts of which each rank has one, a part of them all the same, and now and then no expert."""
    generator = torch.Generator().manual_seed(seed)
    experts = torch.randint(-1, size, (tokens, k), generator=generator, dtype=torch.int32)
    return experts.masked_fill_(torch.rand(tokens, k, generator=generator) < hot, seed % size)


@given(
    st.integers(0, 60), st.integers(1, 4), st.integers(1, 5), st.sampled_from([0.0, 0.5, 1.0]), st.integers(1, 300),
    st.integers(0, 99),
)  # fmt: skip
def test_no_rank_serves_more_than_the_bound(
    tokens: int, k: int, size: int, hot: float, max_pairs: int, seed: int
) -> None:
    """All ranks of a world, each with its own tokens."""
    by_rank = [random_ids(tokens, k, size, hot, seed + rank) for rank in range(size)]
    plans = [token_ranks(experts, torch.arange(size, dtype=torch.int32), size) for experts in by_rank]
    local_pairs = sum(one.counts[:, 1] for one in plans)
    for rank in range(size):
        assert local_pairs[rank] == sum(int((experts == rank).sum()) for experts in by_rank)
    rounds = rounds_needed(int(local_pairs.max()), max_pairs, size, k)
    assert rounds == 1 or int(local_pairs.max()) > max_pairs
    total = 0
    for experts, one in zip(by_rank, plans, strict=True):
        rows = int(one.counts[:, 0].sum())
        source, pair_rows, counts = in_rounds(one, rows, rounds)
        assert torch.equal(counts.sum(dim=0), one.counts) and len(source) == rows
        total = total + counts[..., 1]
        first = 0
        for of_round in counts[:, :, 0].tolist():  # rank after rank, each token once, in order
            for rank, n in enumerate(of_round):
                sent = source[first : first + n]
                assert sent.tolist() == sorted(set(sent.tolist()))
                assert bool((experts[sent.long()] == rank).any(dim=1).all())
                first += n
        # A row says which token it is, so each token gets itself back as often as ranks hold experts of it.
        own = torch.arange(1.0, tokens + 1)[source.long()][:, None]
        ranks = torch.tensor([len(set(row) - {-1}) for row in experts.tolist()], dtype=torch.float32)
        assert torch.equal(combine(own, pair_rows)[:, 0], torch.arange(1.0, tokens + 1) * ranks)
    assert int(total.max()) <= max(max_pairs, size * (k + 1))


@pytest.mark.parametrize(
    ("local_pairs", "max_pairs", "rounds"), [(0, 8, 1), (65536, 65536, 1), (65537, 65536, 2), (3 * 65536, 65536, 4)]
)
def test_rounds(local_pairs: int, max_pairs: int, rounds: int) -> None:
    """64 ranks and 8 experts a token: a round may have 8 more pairs of each rank than its part."""
    assert rounds_needed(local_pairs, max_pairs, 64, 8) == rounds


@pytest.mark.parametrize(
    ("dtype", "quantized"),
    [(torch.float32, False), (torch.bfloat16, False), (torch.float32, True), (torch.bfloat16, True)],
)
def test_sums_are_the_same_bits_in_any_number_of_rounds(dtype: torch.dtype, quantized: bool) -> None:
    """Three ranks with different numbers of tokens, most of which want the same rank; experts that only scale. Also
    if the combine is quantized."""
    size, k, hidden = 3, 4, 132 if quantized else 5
    placement = ExpertPlacement(contiguous(10, size), torch.device("cpu"))
    generator = torch.Generator().manual_seed(1)
    counts = (40, 0, 7)
    tokens = [torch.randn(n, hidden, generator=generator).to(dtype) for n in counts]
    experts = [
        torch.stack([torch.randperm(10, generator=generator)[:k] for _ in range(n)] or [torch.zeros(k)]) for n in counts
    ]
    topk_ids = [
        (one[:n] // torch.randint(1, 3, (n, 1), generator=generator)).int()
        for one, n in zip(experts, counts, strict=True)
    ]
    topk_weights = [torch.rand(n, k, generator=generator) for n in counts]

    def run(max_pairs: int) -> tuple[list[torch.Tensor], set[int], int]:
        rounds, largest = set(), []

        def rank(group: Group) -> torch.Tensor:
            parallel, index = ExpertParallel(group, placement), group.index
            parallel.quantized_sum_bytes = 4 * (33 + 2) if quantized else None
            routed = Routed(tokens[index], topk_ids[index], topk_weights[index])
            dispatch = AllToAll().start(parallel, routed, StepSizes(max(counts), max_pairs))
            rounds.add(dispatch.rounds)
            for number in range(dispatch.rounds):
                here = dispatch.receive(number)
                local = here.local(len(parallel.held))
                largest.append(here.local_pairs)
                assert here.local_pairs == int((local >= 0).sum())
                scale = (here.topk_weights * (local + 1)).where(local >= 0, 0.0).sum(dim=1)
                dispatch.send_back(number, (here.tokens.float() * scale[:, None]).to(dtype))
            return dispatch.combine()

        return on_ranks(size, rank), rounds, max(largest)

    once, rounds, whole = run(sys.maxsize)
    assert rounds == {1} and whole > 50
    for one, own in zip(once, tokens, strict=True):
        assert one.shape == own.shape and one.dtype == dtype
    for bound in (whole, whole - 1, 30, 1):
        again, rounds, largest = run(bound)
        assert len(rounds) == 1 and (rounds == {1}) == (bound == whole)
        assert largest <= max(bound, size * (k + 1))
        assert all(map(torch.equal, again, once)), bound
