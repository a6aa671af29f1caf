"""What the experts of every weight format do with choices as a dispatch brings them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dsa_engine.kernels.moe.expert_mlp import expert_mlp
from operation_cases import CASES, EXPERTS, Make


def on(device: str, value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(on(device, one) for one in value)
    return None if value is None else value.to(device)


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("expert_mlp")])
def test_choices_of_experts_of_all_ranks(name: str, device: str) -> None:
    """Columns of wider rows that name experts of other ranks too: the same bits as if these were −1."""
    (x, experts, weights, gate_up, down, *product), _ = CASES[name](Make())
    experts[::3, 1] = -1
    count, first = EXPERTS - 5, 3
    local = experts - first
    held = [tuple(None if part is None else part[:count] for part in one) for one in (gate_up, down)]
    local[(local < 0) | (local >= count)] = -1
    x, rows, *held = on(device, (x, torch.cat((weights.view(torch.int32), experts, experts), dim=1), *held))
    k = experts.shape[1]
    seen, carried = rows[:, k : 2 * k], rows[:, :k].view(torch.float32)
    out = expert_mlp(x, seen, carried, *held, *product, first=first)
    assert torch.equal(out, expert_mlp(x, local.to(device), weights.to(device), *held, *product)) and out.any()
