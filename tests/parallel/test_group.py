"""Collectives of a group, and what is computed with them, on one rank of several."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from dsa_engine.kernels.linear.linear import linear
from dsa_engine.parallel import group as module
from dsa_engine.parallel.group import Group
from dsa_engine.parallel.tensor_parallel import own_vocab_parallel_logits

SIZE, ROWS, HIDDEN, VOCAB = 3, 4, 8, 12


@dataclass
class OneOfThree(Group):
    """Sends what the rank ``index`` would get from all ranks in an all-to-all."""

    sent: list[torch.Tensor] = field(default_factory=list)  # by each rank

    @property
    def alone(self) -> bool:
        return False

    def _exchange(self, rows: torch.Tensor, send: list[int] | None, receive: list[int] | None) -> torch.Tensor:
        assert torch.equal(rows, self.sent[self.index])
        return torch.cat([theirs.chunk(self.size)[self.index] for theirs in self.sent])


@pytest.mark.parametrize("index", range(SIZE))
def test_a_rank_gets_the_logits_of_its_own_rows(index: int) -> None:
    generator = torch.Generator().manual_seed(0)
    gathered, weight = (torch.randn(n, HIDDEN, generator=generator) for n in (SIZE * ROWS, VOCAB))
    shards = weight.chunk(SIZE)
    group = OneOfThree(tuple(range(SIZE)), index, None, sent=[linear(gathered, shard) for shard in shards])
    mine = slice(index * ROWS, (index + 1) * ROWS)
    whole = torch.cat([linear(gathered, shard) for shard in shards], dim=1)[mine]
    assert torch.equal(own_vocab_parallel_logits(gathered, shards[index], VOCAB, group), whole)
    group.bytes_sent = 0
    padded = own_vocab_parallel_logits(gathered, shards[index], VOCAB - 3, group)  # the last rows are padding
    assert torch.equal(padded, whole[:, : VOCAB - 3]) and padded.is_contiguous()
    assert group.bytes_sent == (SIZE - 1) * ROWS * VOCAB // SIZE * 4, "an all-gather sends three times as much"


def test_only_what_is_waited_for_later_is_asynchronous(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL runs other collectives on the current stream, without events."""
    seen = []

    def gather(into: torch.Tensor, rows: torch.Tensor, group: Any, async_op: bool) -> Any:
        seen.append(async_op)
        into.copy_(rows.repeat(2, 1))
        return type("Work", (), {"wait": lambda self: None})() if async_op else None

    monkeypatch.setattr(module, "_all_gather", gather)
    pair, rows = Group((0, 1), 0, "a group"), torch.ones(1, 3)  # type: ignore[arg-type]
    assert pair.all_gather(rows).shape == pair.all_gather_async(rows)().shape == (2, 3)
    assert seen == [False, True]
