"""The experts against a loop over tokens and choices in float64."""

from __future__ import annotations

import pytest
import torch

from dsa_engine.kernels.expert_mlp import expert_mlp, grouped_matmul

EXPERTS, HIDDEN, WIDTH = 5, 12, 7


def problem(tokens: int, k: int, elsewhere: float, seed: int = 0) -> list[torch.Tensor]:
    """x, experts (a share ``elsewhere`` of them −1, expert 3 never chosen), weights, gate_up, down."""
    g = torch.Generator().manual_seed(seed)
    served = torch.tensor([0, 1, 2, 4])
    experts = torch.stack([served[torch.randperm(4, generator=g)[:k]] for _ in range(tokens)]) if tokens else None
    experts = torch.empty(0, k, dtype=torch.int64) if experts is None else experts
    experts[torch.rand(experts.shape, generator=g) < elsewhere] = -1
    weights = torch.rand(tokens, k, generator=g)
    sizes = ((tokens, HIDDEN), (EXPERTS, 2 * WIDTH, HIDDEN), (EXPERTS, HIDDEN, WIDTH))
    x, gate_up, down = (torch.randn(size, generator=g) for size in sizes)
    return [x, experts.int(), weights, gate_up, down]


def naive(
    x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    x, weights, gate_up, down = (t.double() for t in (x, weights, gate_up, down))
    out = torch.zeros_like(x)
    for t, row in enumerate(experts.tolist()):
        for j, expert in enumerate(row):
            if expert >= 0:
                gate, up = gate_up[expert, :WIDTH] @ x[t], gate_up[expert, WIDTH:] @ x[t]
                out[t] += weights[t, j] * (down[expert] @ (gate / (1 + (-gate).exp()) * up))
    return out


@pytest.mark.parametrize("elsewhere", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("tokens, k", [(0, 2), (1, 1), (1, 4), (50, 3)])
def test_against_a_loop(tokens: int, k: int, elsewhere: float) -> None:
    arguments = problem(tokens, k, elsewhere)
    before = [a.clone() for a in arguments]
    out = expert_mlp(*arguments)
    assert out.shape == (tokens, HIDDEN) and out.dtype == torch.float32
    torch.testing.assert_close(out.double(), naive(*arguments), rtol=1e-4, atol=1e-4)
    assert all(torch.equal(a, b) for a, b in zip(arguments, before, strict=True))
    if elsewhere == 1.0:
        assert not out.any()


@pytest.mark.parametrize("dtype, bound", [(torch.bfloat16, 2e-2), (torch.float16, 3e-3)])
def test_half_precision(dtype: torch.dtype, bound: float) -> None:
    x, experts, weights, gate_up, down = problem(40, 3, 0.2)
    x, gate_up, down = x.to(dtype), gate_up.to(dtype), down.to(dtype)
    out = expert_mlp(x, experts, weights, gate_up, down)
    expected = naive(x, experts, weights, gate_up, down)
    assert out.dtype == dtype
    assert float((out.double() - expected).norm() / expected.norm()) < bound


@pytest.mark.parametrize("counts", [[3, 0, 5, 1, 0], [0, 0, 0, 0, 0], [0, 0, 0, 0, 9]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_matmul(counts: list[int], dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(0)
    x, weight = torch.randn(sum(counts), 8, generator=g).to(dtype), torch.randn(5, 16, 8, generator=g).to(dtype)
    out = grouped_matmul(x, weight, torch.tensor(counts))
    group = [i for i, count in enumerate(counts) for _ in range(count)]
    expected = torch.einsum("ri,roi->ro", x.double(), weight[group].double())
    assert out.dtype == dtype and out.shape == (sum(counts), 16)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5 if dtype == torch.float32 else 2**-7, atol=1e-5)


def test_bad_arguments() -> None:
    x, experts, weights, gate_up, down = problem(4, 2, 0.0)
    with pytest.raises(ValueError, match=r"weights \(4, 1\)"):
        expert_mlp(x, experts, weights[:, :1], gate_up, down)
    with pytest.raises(ValueError, match=r"x \(3, 12\)"):
        expert_mlp(x[:3], experts, weights, gate_up, down)
    with pytest.raises(ValueError, match="do not fit"):
        grouped_matmul(x, gate_up[:, :, :5], torch.ones(EXPERTS))
    with pytest.raises(ValueError, match="do not fit"):
        grouped_matmul(x, gate_up, torch.ones(EXPERTS - 1))
