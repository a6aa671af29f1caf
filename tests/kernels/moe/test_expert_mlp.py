"""The experts against a loop over token-expert pairs in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from dsa_engine.kernels.formats.int8 import int8_words, quantize_rows_int8
from dsa_engine.kernels.grouped.grouped_matmul_int4 import W4A8
from dsa_engine.kernels.grouped.grouped_matmul_int8 import INT8
from dsa_engine.kernels.moe.expert_mlp import expert_mlp
from dsa_engine.kernels.moe.pack_tokens import pack_tokens, tokens_of
from dsa_engine.kernels.runtime.launch import INTERPRETED
from dsa_engine.parallel.experts.traffic import RowBytes, quantized_bytes
from operation_cases import CASES, Make
from operation_cases import EXPERTS as MADE

Error = Callable[[torch.Tensor, torch.Tensor], float]

pytestmark = pytest.mark.usefixtures("on_a_cpu")

EXPERTS, HIDDEN, WIDTH = 5, 12, 7


def problem(tokens: int, k: int, elsewhere: float, seed: int = 0) -> list[torch.Tensor]:
    """x, topk_ids (a fraction ``elsewhere`` of them −1, expert 3 never chosen), topk_weights, gate_up, down."""
    g = torch.Generator().manual_seed(seed)
    chosen = torch.tensor([0, 1, 2, 4])
    topk_ids = torch.stack([chosen[torch.randperm(4, generator=g)[:k]] for _ in range(tokens)]) if tokens else None
    topk_ids = torch.empty(0, k, dtype=torch.int64) if topk_ids is None else topk_ids
    topk_ids[torch.rand(topk_ids.shape, generator=g) < elsewhere] = -1
    topk_weights = torch.rand(tokens, k, generator=g)
    sizes = ((tokens, HIDDEN), (EXPERTS, 2 * WIDTH, HIDDEN), (EXPERTS, HIDDEN, WIDTH))
    x, gate_up, down = (torch.randn(size, generator=g) for size in sizes)
    return [x, topk_ids.int(), topk_weights, gate_up, down]


def run(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    **how: Any,
) -> torch.Tensor:
    return expert_mlp(x, topk_ids, topk_weights, (gate_up,), (down,), **how)


def naive(
    x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    x, topk_weights, gate_up, down = (t.double() for t in (x, topk_weights, gate_up, down))
    width = down.shape[2]
    out = torch.zeros_like(x)
    for t, row in enumerate(topk_ids.tolist()):
        for j, expert in enumerate(row):
            if expert >= 0:
                gate, up = gate_up[expert, :width] @ x[t], gate_up[expert, width:] @ x[t]
                out[t] += topk_weights[t, j] * (down[expert] @ (gate / (1 + (-gate).exp()) * up))
    return out


@pytest.mark.parametrize("elsewhere", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("tokens, k", [(0, 2), (1, 1), (1, 4), (50, 3)])
def test_against_a_loop(tokens: int, k: int, elsewhere: float, device: str) -> None:
    arguments = problem(tokens, k, elsewhere)
    moved = [a.to(device) for a in arguments]
    out = run(*moved)
    assert out.shape == (tokens, HIDDEN) and out.dtype == torch.float32
    torch.testing.assert_close(out.double().cpu(), naive(*arguments), rtol=1e-4, atol=1e-4)
    assert all(torch.equal(a.cpu(), b) for a, b in zip(moved, arguments, strict=True))
    if elsewhere == 1.0:
        assert not out.any()


def test_dtypes(dtype: torch.dtype, bound: float, device: str, relative_error: Error) -> None:
    x, topk_ids, topk_weights, gate_up, down = (a.to(device) for a in problem(40, 3, 0.2))
    x, gate_up, down = x.to(dtype), gate_up.to(dtype), down.to(dtype)
    out = run(x, topk_ids, topk_weights, gate_up, down)
    assert out.dtype == dtype
    assert relative_error(out, naive(*(a.cpu() for a in (x, topk_ids, topk_weights, gate_up, down)))) < bound


@pytest.mark.parametrize("local_fraction", [1.0, 1e-3, 1000.0])
@pytest.mark.parametrize("uncounted_bytes", [0, 1 << 30], ids=["counted", "uncounted"])
@pytest.mark.parametrize("elsewhere", [0.7, 1.0])
def test_every_way_gives_the_same(local_fraction: float, uncounted_bytes: int, elsewhere: float, device: str) -> None:
    arguments = [a.to(device) for a in problem(30, 4, elsewhere)]
    out = run(*arguments, local_fraction=local_fraction, uncounted_bytes=uncounted_bytes)
    torch.testing.assert_close(out, run(*arguments), rtol=1e-5, atol=1e-5)


def test_products_of_pytorch(dtype: torch.dtype, bound: float, device: str, relative_error: Error) -> None:
    """Many rows of widths that PyTorch's own grouped product takes, in bfloat16 on a GPU."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(70, 32, generator=g).to(dtype)
    topk_ids = torch.randint(-1, 2, (70, 2), generator=g, dtype=torch.int32)
    topk_weights = torch.rand(70, 2, generator=g)
    gate_up, down = (torch.randn(s, generator=g).to(dtype) / 6 for s in ((2, 32, 32), (2, 32, 16)))
    arguments = x, topk_ids, topk_weights, gate_up, down
    for uncounted_bytes in (0, 1 << 30):
        out = run(*(a.to(device) for a in arguments), uncounted_bytes=uncounted_bytes)
        assert relative_error(out, naive(*arguments)) < bound


def test_the_same_bits_each_time(device: str) -> None:
    arguments = [a.to(device) for a in problem(50, 3, 0.2)]
    assert torch.equal(run(*arguments), run(*arguments))


@pytest.mark.skipif(INTERPRETED, reason="what the CPU's own kernel and the reference are given")
def test_what_does_not_lie_in_memory_is_not_read() -> None:
    x, topk_ids, topk_weights, gate_up, down = problem(4, 2, 0.0)
    halves = topk_weights.bfloat16()
    out = run(x, topk_ids, halves, gate_up, down)
    torch.testing.assert_close(out, run(x, topk_ids, halves.float(), gate_up, down))
    with pytest.raises(ValueError, match="x is torch.float32, the weight torch.bfloat16"):
        run(x, topk_ids, topk_weights, gate_up.bfloat16(), down.bfloat16())
    topk_ids[1, 1] = 1 << 20
    with pytest.raises(IndexError):
        run(x, topk_ids, topk_weights, gate_up, down)


def on(device: str, value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(on(device, one) for one in value)
    return None if value is None else value.to(device)


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("expert_mlp")])
def test_topk_ids_of_all_ranks(name: str, device: str) -> None:
    """Columns of wider rows that name experts of other ranks too: the same bits as if these were −1."""
    (x, topk_ids, topk_weights, gate_up, down, *product), _ = CASES[name](Make())
    topk_ids[::3, 1] = -1
    count, first = MADE - 5, 3
    local = topk_ids - first
    held = [tuple(None if part is None else part[:count] for part in one) for one in (gate_up, down)]
    local[(local < 0) | (local >= count)] = -1
    x, rows, *held = on(device, (x, torch.cat((topk_weights.view(torch.int32), topk_ids, topk_ids), dim=1), *held))
    k = topk_ids.shape[1]
    seen, carried = rows[:, k : 2 * k], rows[:, :k].view(torch.float32)
    out = expert_mlp(x, seen, carried, *held, *product, first=first)
    assert torch.equal(out, expert_mlp(x, local.to(device), topk_weights.to(device), *held, *product)) and out.any()


@pytest.mark.parametrize("tokens", [3, 60])
@pytest.mark.parametrize("name", ["INT8", "W4A8"])
def test_tokens_that_came_as_codes(name: str, tokens: int, device: str) -> None:
    """The same bits as if they were quantised here, for few rows and many, read from the rows of a collective."""
    make = Make()
    x, topk_ids, topk_weights = (one[:tokens] for one in make.experts())
    hidden, product = x.shape[1], INT8 if name == "INT8" else W4A8
    sizes = (MADE, 64, hidden), (MADE, hidden, 32)
    held = [make.int8(*size) for size in sizes]
    if product is W4A8:
        sizes = (MADE, 256, hidden), (MADE, hidden, 128)
        held = [(*make.int4(*size, int8_activations=True), None) for size in sizes]
    topk_ids[1] = -1
    x, topk_ids, topk_weights, *held = on(device, (x, topk_ids, topk_weights, *held))
    x[0] = 0
    words = int8_words(x)
    assert words.shape[1] == hidden // 4 + 1
    codes, scales = quantize_rows_int8(x)
    assert torch.equal(words, torch.cat((codes.view(torch.int32), scales.view(torch.int32)[:, None]), dim=1))
    packed = pack_tokens(words, topk_ids, topk_weights)
    assert packed.shape[1] * 4 == RowBytes.of(quantized_bytes(hidden, hidden), topk_ids.shape[1]).there
    came = tokens_of(packed, words.shape[1], torch.int32)
    out = expert_mlp(came, topk_ids, topk_weights, *held, product, dtype=x.dtype)
    assert torch.equal(out, expert_mlp(x, topk_ids, topk_weights, *held, product)) and out.any()
    with pytest.raises(ValueError, match="quantised tokens|do not fit"):
        expert_mlp(words[:, 1:], topk_ids, topk_weights, *held, product, dtype=x.dtype)
    assert int8_words(x[:, 1:]).dtype == x.dtype, "no whole words"
