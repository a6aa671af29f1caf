"""Tokens, `topk_ids` and `topk_weights` in one row, against plain Python."""

from __future__ import annotations

import pytest
import torch

from dsa_engine.kernels.moe.choose_replicas import Replicas, choose_replicas
from dsa_engine.kernels.moe.pack_tokens import pack_tokens, row_words, tokens_of, unpacked


def random_tokens(
    count: int, hidden: int, k: int, dtype: torch.dtype, device: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(count * hidden + k)
    tokens = torch.randn(count, hidden, generator=g).to(dtype)
    topk_ids = torch.randint(-1, 40, (count, k), generator=g, dtype=torch.int32)
    return tokens.to(device), topk_ids.to(device), torch.randn(count, k, generator=g).to(device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize(("hidden", "k"), [(1, 1), (7, 3), (33, 8), (2049, 6)])
def test_what_is_packed_is_what_arrives(hidden: int, k: int, dtype: torch.dtype, device: str) -> None:
    tokens, topk_ids, topk_weights = random_tokens(5, hidden, k, dtype, device)
    packed = pack_tokens(tokens, topk_ids, topk_weights, rows=9)
    width = row_words(hidden, dtype, k)
    assert packed.shape == (9, width) and width % 4 == 0 and 4 * width < hidden * dtype.itemsize + 8 * k + 4 + 16
    seen = tokens_of(packed, hidden, dtype)
    assert seen.data_ptr() == packed.data_ptr(), "tokens are read where they have arrived"
    assert torch.equal(seen[:5].float(), tokens.float()) and not seen[5:].float().any()
    _, chosen, carried = unpacked(packed, tokens, k)
    assert torch.equal(chosen[:5], topk_ids) and bool((chosen[5:] == -1).all())
    assert torch.equal(carried[:5], topk_weights) and not carried[5:].any(), "bit for bit"
    again = pack_tokens(seen, chosen, carried)
    assert torch.equal(again, packed), "pairs are read where they have arrived"


def test_rows_in_another_order_and_several_times(device: str) -> None:
    tokens, topk_ids, topk_weights = random_tokens(6, 40, 2, torch.float32, device)
    strided = torch.cat((tokens, tokens), dim=1)[:, 20:60]
    source = torch.tensor([4, 0, 0, 5], dtype=torch.int32, device=device)
    packed = pack_tokens(strided, topk_ids, topk_weights, source=source)
    assert torch.equal(tokens_of(packed, 40, torch.float32), strided[source.long()])
    _, chosen, carried = unpacked(packed, strided, 2)
    assert torch.equal(chosen, topk_ids[source.long()]) and torch.equal(carried, topk_weights[source.long()])


@pytest.mark.parametrize("taken", [None, [4, 0, 0, 5]])
def test_replicas_that_are_chosen_on_the_way(taken: list[int] | None, device: str) -> None:
    """As if they had been chosen before; the table need not be as it was when a CUDA graph was captured."""
    tokens, topk_ids, topk_weights = random_tokens(6, 40, 3, torch.bfloat16, device)
    source = None if taken is None else torch.tensor(taken, dtype=torch.int32, device=device)
    rows = 8 if taken is None else None
    number = torch.arange(40, dtype=torch.int32, device=device)
    table = torch.stack((1 + number % 3, 3 * number, 3 * number + 1, 3 * number + 2), dim=1)
    before = None
    for replicas in (Replicas(table, 0), Replicas(table, 63), Replicas(table.clone().fill_(1), 63)):
        physical = choose_replicas(topk_ids, *replicas)
        assert before is None or not torch.equal(physical, before)
        packed = pack_tokens(tokens, topk_ids, topk_weights, source=source, rows=rows, replicas=replicas)
        assert torch.equal(packed, pack_tokens(tokens, physical, topk_weights, source=source, rows=rows))
        before = physical


def test_nothing_to_pack(device: str) -> None:
    tokens, topk_ids, topk_weights = random_tokens(0, 12, 2, torch.bfloat16, device)
    packed = pack_tokens(tokens, topk_ids, topk_weights, rows=2)
    assert unpacked(packed, tokens, 2)[1].tolist() == [[-1, -1]] * 2
    assert pack_tokens(tokens, topk_ids, topk_weights).shape == (0, row_words(12, torch.bfloat16, 2))
    source = torch.empty(0, dtype=torch.int32, device=device)
    assert pack_tokens(tokens, topk_ids, topk_weights, source=source).shape[0] == 0
