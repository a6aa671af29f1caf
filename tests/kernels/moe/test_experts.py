"""What the experts of every weight format do with choices as a dispatch brings them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from dsa_engine.kernels.moe.block_scaled_experts import block_scaled_experts
from dsa_engine.kernels.moe.expert_mlp import expert_mlp
from dsa_engine.kernels.moe.expert_mlp_int4 import expert_mlp_int4
from dsa_engine.kernels.moe.expert_mlp_int8 import expert_mlp_int8
from operation_cases import CASES, EXPERTS, Make


def on(device: str, value: Any) -> Any:
    return tuple(on(device, one) for one in value) if isinstance(value, tuple) else value.to(device)


@pytest.mark.parametrize("run", [expert_mlp, block_scaled_experts, expert_mlp_int8, expert_mlp_int4])
def test_choices_of_experts_of_all_ranks(run: Callable[..., torch.Tensor], device: str) -> None:
    """Columns of wider rows that name experts of other ranks too: the same bits as if these were −1."""
    (x, experts, weights, *stored), _ = CASES[run.__name__](Make())
    experts[::3, 1] = -1
    count, first = EXPERTS - 5, 3
    local = experts - first
    held = [one[:count] if torch.is_tensor(one) else tuple(part[:count] for part in one) for one in stored]
    local[(local < 0) | (local >= count)] = -1
    x, rows, *held = on(device, (x, torch.cat((weights.view(torch.int32), experts, experts), dim=1), *held))
    k = experts.shape[1]
    seen, carried = rows[:, k : 2 * k], rows[:, :k].view(torch.float32)
    out = run(x, seen, carried, *held, first=first)
    assert torch.equal(out, run(x, local.to(device), weights.to(device), *held)) and out.any()
