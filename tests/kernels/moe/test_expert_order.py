"""The order of token-expert pairs against Python's sort, and the weighted sum against a loop in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from dsa_engine.kernels.moe import expert_order as module
from dsa_engine.kernels.moe.combine import combine
from dsa_engine.kernels.moe.expert_order import expert_order
from dsa_engine.kernels.runtime.launch import INTERPRETED

Error = Callable[[torch.Tensor, torch.Tensor], float]


def random_ids(tokens: int, k: int, count: int, elsewhere: float, seed: int = 0) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    topk_ids = torch.randint(0, count, (tokens, k), generator=g, dtype=torch.int32)
    topk_ids[torch.rand(topk_ids.shape, generator=g) < elsewhere] = -1
    return topk_ids


def check(order: module.Order, topk_ids: torch.Tensor, count: int) -> None:
    pairs = topk_ids.flatten().tolist()
    rows = sorted((i for i, e in enumerate(pairs) if e >= 0), key=lambda i: pairs[i])  # stable
    k = topk_ids.shape[1]
    assert order.tokens.dtype == order.row_ends.dtype == order.pair_rows.dtype == torch.int32
    assert order.tokens.shape == (len(pairs),) and order.pair_rows.shape == topk_ids.shape
    assert order.tokens[: len(rows)].tolist() == [i // k for i in rows]
    # Rows of other ranks' pairs name a token too, for callers that gather all rows.
    assert all(0 <= token < topk_ids.shape[0] for token in order.tokens.tolist())
    assert order.row_ends.tolist() == [sum(0 <= pair <= e for pair in pairs) for e in range(count)]
    pair_row = {pair: row for row, pair in enumerate(rows)}
    assert order.pair_rows.flatten().tolist() == [pair_row.get(i, -1) for i in range(len(pairs))]


@pytest.mark.parametrize("elsewhere", [0.0, 0.5, 1.0])
@pytest.mark.parametrize(
    "tokens, k, count", [(1, 1, 1), (1, 8, 256), (16, 8, 4), (37, 3, 5), (9, 1, 4), (0, 8, 32), (5, 0, 4), (3, 5, 300)]
)
def test_order(tokens: int, k: int, count: int, elsewhere: float, device: str) -> None:
    topk_ids = random_ids(tokens, k, count, elsewhere)
    check(expert_order(topk_ids.to(device), count), topk_ids, count)


@pytest.fixture(params=[0, module.READ_TOKENS], ids=["in blocks", "by tokens"])
def many(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """More pairs than are compared with all others, ordered in both ways."""
    monkeypatch.setattr(module, "READ_TOKENS", request.param)


@pytest.mark.usefixtures("many")
@pytest.mark.parametrize(("tokens", "k", "count", "elsewhere"), [(1100, 8, 40, 0.0), (2800, 3, 70, 0.9)])
def test_order_of_many(tokens: int, k: int, count: int, elsewhere: float, device: str) -> None:
    """Several blocks, the last of them not full."""
    topk_ids = random_ids(tokens, k, count, elsewhere)
    assert topk_ids.numel() > module.COMPARED_PAIRS and topk_ids.numel() % module.BLOCK_PAIRS
    check(expert_order(topk_ids.to(device), count), topk_ids, count)


@pytest.mark.usefixtures("many")
@pytest.mark.parametrize("same", [0, 39, -1])
def test_order_of_many_that_are_alike(same: int, device: str) -> None:
    """All pairs of an expert: the rows of one block come after those of the block before."""
    topk_ids = torch.full((1100, 8), same, dtype=torch.int32)
    check(expert_order(topk_ids.to(device), 40), topk_ids, 40)


def check_columns(tokens: int, device: str) -> None:
    topk_ids = random_ids(tokens, 6, 5, 0.2)
    check(expert_order(topk_ids.to(device)[:, 2:5], 5), topk_ids[:, 2:5], 5)
    topk_ids = random_ids(tokens, 6, 40, 0.2)
    local = [[e - 10 if 10 <= e < 26 else -1 for e in row] for row in topk_ids[:, 1:5].tolist()]
    check(expert_order(topk_ids.to(device)[:, 1:5], 16, first=10), torch.tensor(local, dtype=torch.int32), 16)


def test_a_column_of_a_wider_matrix(device: str) -> None:
    """The dispatch passes a slice of the words that it received, and they name the experts of all ranks."""
    check_columns(12, device)


@pytest.mark.usefixtures("many")
def test_a_column_of_a_wider_matrix_with_many_pairs(device: str) -> None:
    check_columns(2800, device)


@pytest.mark.parametrize("elsewhere", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("tokens, k, width", [(1, 8, 7168), (2, 8, 6144), (9, 3, 50), (1, 1, 1), (0, 4, 16), (3, 0, 8)])
def test_combine(
    tokens: int,
    k: int,
    width: int,
    elsewhere: float,
    dtype: torch.dtype,
    bound: float,
    device: str,
    relative_error: Error,
) -> None:
    g = torch.Generator().manual_seed(0)
    local_pairs = tokens * k
    y = torch.randn(local_pairs + 1, width, generator=g).to(dtype)
    y[local_pairs] = float("nan")  # a row that is not asked for
    pair_rows = torch.randperm(local_pairs, generator=g, dtype=torch.int32).view(tokens, k)
    pair_rows[torch.rand(pair_rows.shape, generator=g) < elsewhere] = -1
    topk_weights = torch.rand(tokens, k, generator=g)
    topk_weights[pair_rows < 0] = float("nan")
    wider = torch.cat((torch.full((tokens, 2), float("nan")), topk_weights), dim=1).to(device)
    out = combine(y.to(device), pair_rows.to(device), wider[:, 2:])
    assert torch.equal(out, combine(y.to(device), pair_rows.to(device), topk_weights.to(device)))
    assert out.dtype == dtype and out.shape == (tokens, width)
    wanted = torch.zeros(tokens, width, dtype=torch.float64)
    for t in range(tokens):
        for j in range(k):
            if pair_rows[t, j] >= 0:
                wanted[t] += topk_weights[t, j].double() * y[pair_rows[t, j]].double()
    assert relative_error(out, wanted) < bound
    if elsewhere == 1.0:
        assert not out.any()


def test_sums_are_float32(device: str) -> None:
    """8 rows of 1 with weight 2⁻¹² beside a row of 1: float16 would lose them all."""
    pair_rows = torch.arange(9, dtype=torch.int32, device=device).view(1, 9)
    topk_weights = torch.tensor([[1.0] + [2**-12] * 8], device=device)
    assert combine(torch.ones(9, 4, dtype=torch.float16, device=device), pair_rows, topk_weights)[0, 0] == 1 + 2**-9


@pytest.mark.skipif(not INTERPRETED, reason="4 GiB that only the interpreter leaves untouched")
def test_rows_beyond_2_to_the_31_elements() -> None:
    width = 1 << 13
    y = torch.empty((1 << 18) + 3, width, dtype=torch.float16)
    pair_rows = torch.tensor([[5, (1 << 18) + 2]], dtype=torch.int32)
    y[5], y[(1 << 18) + 2] = 1.0, 2.0
    out = combine(y, pair_rows, torch.tensor([[1.0, 0.25]]))
    assert bool((out == 1.5).all())


def test_plain_sums(device: str) -> None:
    """Without weights, as rows come back from other ranks; a token that was sent to no rank is zero."""
    y = torch.tensor([[1.0, 2.0], [4.0, 8.0], [float("nan")] * 2], device=device)
    pair_rows = torch.tensor([[1, -1, 0], [-1, -1, -1], [-1, 1, -1]], dtype=torch.int32, device=device)
    assert combine(y, pair_rows).tolist() == [[5.0, 10.0], [0.0, 0.0], [4.0, 8.0]]
