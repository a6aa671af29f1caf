"""The split of a sequence over ranks: complete for any length, and balanced in causal work for long ones."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dsa_engine import SamplingParams
from dsa_engine.commands.bench.prefill_benchmark import attention_pairs
from dsa_engine.config.model import ModelConfig
from dsa_engine.demo import demo_folder
from dsa_engine.engine.requests.request import Chunk, Request
from dsa_engine.engine.steps.plan import StepPlan
from dsa_engine.parallel.context_parallel import pieces_of


def split_sequence(start: int, length: int, ranks: int) -> list[list[tuple[int, int]]]:
    """The pieces ``(start, length)`` of every rank; empty ones are omitted."""
    one_each = torch.ones(ranks, dtype=torch.int64)
    starts, lengths = pieces_of(start * one_each, length * one_each, torch.arange(ranks), ranks * one_each)
    of_ranks = (zip(*pair, strict=True) for pair in zip(starts.tolist(), lengths.tolist(), strict=True))
    return [[piece for piece in pieces if piece[1]] for pieces in of_ranks]


def pairs(runs: list[tuple[int, int]]) -> int:
    """Query-key pairs under the causal mask, counted one by one."""
    return sum(position + 1 for start, length in runs for position in range(start, start + length))


def imbalance(work: list[int]) -> float:
    return max(work) / (sum(work) / len(work)) - 1


@settings(deadline=None)
@given(st.integers(0, 5000), st.integers(0, 3000), st.integers(1, 70))
@example(0, 0, 4)
@example(0, 1, 64)
@example(7, 2 * 5 - 1, 5)
@example(7, 2 * 5 + 1, 5)
def test_every_token_has_one_rank(start: int, length: int, ranks: int) -> None:
    divided = split_sequence(start, length, ranks)
    assert len(divided) == ranks
    owned = [position for runs in divided for first, count in runs for position in range(first, first + count)]
    assert sorted(owned) == list(range(start, start + length))
    counts = [sum(count for _, count in runs) for runs in divided]
    assert max(counts) - min(counts) <= 1
    for runs in divided:
        assert all(count > 0 for _, count in runs)
        assert all(a + n < b for (a, n), (b, _) in pairwise(runs)), "in order, and joined where they meet"
        assert len(runs) <= 2


@settings(deadline=None)
@given(st.integers(0, 5000), st.integers(0, 3000), st.integers(1, 70))
def test_pieces_follow_from_counts(start: int, length: int, ranks: int) -> None:
    """The pieces that are found one after the other from the head and from the tail."""
    counts = [length // ranks + (rank < length % ranks) for rank in range(ranks)]
    head, tail, divided = start, start + length, []
    for count in counts:
        at_tail = count // 2
        tail -= at_tail
        joined = head + count - at_tail == tail
        segments = [(head, count)] if joined else [(head, count - at_tail), (tail, at_tail)]
        divided.append([segment for segment in segments if segment[1]])
        head += count - at_tail
    assert split_sequence(start, length, ranks) == divided


def test_head_tail_pairs_a_head_with_a_tail_piece() -> None:
    assert split_sequence(0, 16, 4) == [[(0, 2), (14, 2)], [(2, 2), (12, 2)], [(4, 2), (10, 2)], [(6, 4)]]
    assert split_sequence(100, 3, 4) == [[(100, 1)], [(101, 1)], [(102, 1)], []]


@settings(deadline=None)
@given(st.integers(2, 64), st.integers(8192, 40000))
@example(64, 8193)
@example(64, 8257)
@example(63, 8254)
@example(48, 8209)
def test_head_tail_is_balanced_from_8k_on(ranks: int, length: int) -> None:
    work = [pairs(runs) for runs in split_sequence(0, length, ranks)]
    assert sum(work) == length * (length + 1) // 2
    assert imbalance(work) < 0.01


@pytest.mark.parametrize("ranks", [2, 3, 4, 7, 8, 64])
@pytest.mark.parametrize(("length", "step"), [(32768, 8192), (32768, 32768), (32700, 4096)])
def test_attention_work_of_a_chunked_prefill(ranks: int, length: int, step: int, demo_cache: object) -> None:
    config = ModelConfig.from_pretrained(demo_folder())
    sequence = Request(0, [2] * length, SamplingParams())
    work = [0] * ranks
    for first in range(0, length, step):
        chunk = Chunk(sequence, first, min(step, length - first), range(ranks))
        pairs_of_ranks = attention_pairs(StepPlan.of([chunk], 0, ranks, config))
        work = [a + b for a, b in zip(work, pairs_of_ranks, strict=True)]
    assert sum(work) == length * (length + 1) // 2 and imbalance(work) < 0.01
