"""FP8 experts against a loop over token-expert pairs, in float64 sums of the same codes and scales."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from dsa_engine.kernels.formats.fp8 import dequantize_blocks, quantize_blocks
from dsa_engine.kernels.formats.quantize import quantize_rows, quantize_tokens, quantized_words
from dsa_engine.kernels.grouped.grouped_matmul_fp8 import block_fp8, grouped_matmul_fp8
from dsa_engine.kernels.grouped.products import Groups
from dsa_engine.kernels.moe.expert_mlp import expert_mlp
from dsa_engine.kernels.moe.pack_tokens import pack_tokens, tokens_of
from dsa_engine.kernels.runtime.launch import INTERPRETED
from dsa_engine.parallel.experts.traffic import RowBytes, quantized_bytes

pytestmark = pytest.mark.usefixtures("on_a_cpu")

Error = Callable[[torch.Tensor, torch.Tensor], float]
EXPERTS = 4


def problem(tokens: int, k: int, hidden: int, width: int, elsewhere: float = 0.0) -> list[torch.Tensor]:
    """x, topk_ids (a fraction ``elsewhere`` of them −1, expert 2 never chosen), topk_weights; codes and scales of gate
    and up, and of down."""
    g = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, hidden, generator=g)
    chosen = torch.tensor([0, 1, 3])
    topk_ids = chosen[torch.randint(3, (tokens, k), generator=g)]
    topk_ids[torch.rand(topk_ids.shape, generator=g) < elsewhere] = -1
    gate_up = [quantize_blocks(torch.randn(width, hidden, generator=g) / 8, (128, 128)) for _ in range(2 * EXPERTS)]
    down = [quantize_blocks(torch.randn(hidden, width, generator=g), (128, 128)) for _ in range(EXPERTS)]
    stacked = [torch.stack(t).unflatten(0, (EXPERTS, 2)) for t in zip(*gate_up, strict=True)]
    stacked += [torch.stack(t) for t in zip(*down, strict=True)]
    return [x, topk_ids.int(), torch.rand(tokens, k, generator=g), *stacked]


def dequantized(x: torch.Tensor, power_of_two: bool) -> torch.Tensor:
    """float64 numbers of the codes that a row is quantised to."""
    codes, scales = quantize_rows(x.cpu(), 128, power_of_two)
    return codes.double() * scales.double().repeat_interleave(128, dim=-1)[..., : x.shape[-1]]


def run(
    x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, gate_up: torch.Tensor,
    gate_up_scale: torch.Tensor, down: torch.Tensor, down_scale: torch.Tensor, power_of_two: bool = False, **how: Any,
) -> torch.Tensor:  # fmt: skip
    product = block_fp8(power_of_two, down.shape[1])
    return expert_mlp(x, topk_ids, topk_weights, (gate_up, gate_up_scale), (down, down_scale), product, **how)


def naive(
    x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, gate_up: torch.Tensor,
    gate_up_scale: torch.Tensor, down: torch.Tensor, down_scale: torch.Tensor, power_of_two: bool,
) -> torch.Tensor:  # fmt: skip
    rows, out = dequantized(x, power_of_two), torch.zeros(x.shape, dtype=torch.float64)
    for t, row in enumerate(topk_ids.tolist()):
        for j, e in enumerate(row):
            if e < 0:
                continue
            gate, up = (
                dequantize_blocks(gate_up[e, i].cpu(), gate_up_scale[e, i].cpu(), (128, 128)).double() @ rows[t]
                for i in range(2)
            )
            hidden = dequantized((gate / (1 + (-gate).exp()) * up).float()[None], power_of_two)[0]
            out[t] += topk_weights[t, j] * (
                dequantize_blocks(down[e].cpu(), down_scale[e].cpu(), (128, 128)).double() @ hidden
            )
    return out


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize(
    "tokens, k, hidden, width",
    [(0, 2, 128, 128), (1, 1, 128, 128), (9, 2, 160, 96), (3, 3, 256, 200), (40, 2, 128, 40)],
)
def test_against_a_loop(
    tokens: int, k: int, hidden: int, width: int, power_of_two: bool, device: str, fp8_mlp_bound: float,
    relative_error: Error,
) -> None:  # fmt: skip
    """Few and many rows an expert, widths that the block does not divide, experts of other ranks."""
    arguments = problem(tokens, k, hidden, width, elsewhere=0.3)
    out = run(*(a.to(device) for a in arguments), power_of_two=power_of_two)
    assert out.shape == (tokens, hidden) and out.dtype == torch.float32
    # One in thousands of the values between the products lies so near between two codes that rounding decides.
    assert relative_error(out, naive(*arguments, power_of_two)) < fp8_mlp_bound


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("hidden", [128, 160])
def test_tokens_that_were_quantised_before_they_travelled(hidden: int, power_of_two: bool, device: str) -> None:
    """The same bits, read from packed rows; these have the bytes that are counted without them."""
    x, topk_ids, topk_weights, *stored = (one.to(device) for one in problem(9, 2, hidden, 96, elsewhere=0.3))
    words = quantize_tokens(x, power_of_two)
    codes, scales = quantize_rows(x, 128, power_of_two)
    assert torch.equal(words, torch.cat((codes.view(torch.int32), scales.view(torch.int32)), dim=1))
    assert words.shape[1] == quantized_words(hidden) == quantized_bytes(hidden) // 4
    packed = pack_tokens(words, topk_ids, topk_weights)
    assert packed.shape[1] * 4 == RowBytes.of(quantized_bytes(hidden), 2).there
    tokens = tokens_of(packed, words.shape[1], torch.int32)
    out = run(tokens, topk_ids, topk_weights, *stored, power_of_two=power_of_two, dtype=torch.float32)
    assert torch.equal(out, run(x, topk_ids, topk_weights, *stored, power_of_two=power_of_two))
    with pytest.raises(ValueError, match="quantised tokens"):
        run(words[:, 1:], topk_ids, topk_weights, *stored, dtype=torch.float32)


def test_dtypes(dtype: torch.dtype, bound: float, device: str, fp8_mlp_bound: float, relative_error: Error) -> None:
    x, *rest = problem(12, 2, 256, 128)
    x = x.to(dtype)
    out = run(x.to(device), *(a.to(device) for a in rest))
    assert out.dtype == dtype
    assert relative_error(out, naive(x, *rest, power_of_two=False)) < max(bound, fp8_mlp_bound)


@pytest.mark.parametrize("uncounted_bytes", [0, 1 << 30], ids=["counted", "uncounted"])
@pytest.mark.parametrize("elsewhere", [0.7, 1.0])
def test_every_way_gives_the_same(uncounted_bytes: int, elsewhere: float, device: str, relative_error: Error) -> None:
    arguments = [a.to(device) for a in problem(15, 4, 128, 96, elsewhere)]
    once = run(*arguments)
    for fraction in (1e-3, 1000.0):
        out = run(*arguments, local_fraction=fraction, uncounted_bytes=uncounted_bytes)
        assert relative_error(out, once) < 1e-3
    if elsewhere == 1.0:
        assert not once.any()


@pytest.mark.skipif(not INTERPRETED and not torch.cuda.is_available(), reason="needs the kernel to run")
@pytest.mark.parametrize("hidden, width", [(256, 256), (160, 200)])
def test_tiles_of_all_sizes_give_the_same_bits(hidden: int, width: int, device: str) -> None:
    """Codes and scales between the products, of few rows, many, and more than a large tile; with exact sums."""
    g, counts = torch.Generator().manual_seed(width), (3, 0, 133)
    numbers = [torch.randint(-4, 5, shape, generator=g) for shape in ((136, hidden), (3, 2, width, hidden))]
    x, weight = (one.float().to(torch.float8_e4m3fn).to(device) for one in numbers)
    scales = [2.0 ** -torch.randint(4, 9, shape, generator=g) for shape in ((136, 2), (3, 2, 2, 2))]
    row_ends = torch.tensor(counts).cumsum(0).int().to(device)
    x_scale, weight_scale = (one.to(device) for one in scales)
    made = []
    for expected in (1.0, 3 * 64.0, 3 * 128.0):
        codes, scale = grouped_matmul_fp8(
            x, x_scale, weight, weight_scale, Groups(row_ends, gated=True, expected=expected), torch.float32, False
        )
        made.append((codes.view(torch.uint8), scale))
    assert all(torch.equal(*pair) for other in made[1:] for pair in zip(made[0], other, strict=True))


def test_a_token_does_not_see_the_others(device: str, relative_error: Error) -> None:
    x, topk_ids, topk_weights, *stored = (a.to(device) for a in problem(6, 2, 160, 96))
    together = run(x, topk_ids, topk_weights, *stored)
    alone = [run(x[t, None], topk_ids[t, None], topk_weights[t, None], *stored) for t in range(6)]
    assert relative_error(together, torch.cat(alone)) < 1e-3


def test_no_tokens(device: str) -> None:
    assert run(*(a.to(device) for a in problem(0, 2, 128, 128))).shape == (0, 128)


@pytest.mark.skipif(INTERPRETED, reason="the interpreter takes that code for a number, 480")
@pytest.mark.parametrize("code", [0x7F, 0xFF])
@pytest.mark.parametrize("power_of_two", [False, True])
def test_the_code_that_is_no_number(power_of_two: bool, code: int, device: str) -> None:
    """A damaged weight is seen: of the gate in all numbers of the expert's tokens, of the other product in one."""
    x, topk_ids, topk_weights, gate_up, gate_up_scale, down, down_scale = problem(9, 1, 160, 96)
    gate_up.view(torch.uint8)[0, 0, 3, 5], down.view(torch.uint8)[1, 7, 50] = code, code
    stored = (topk_weights, gate_up, gate_up_scale, down, down_scale)
    lost = run(*(a.to(device) for a in (x, topk_ids, *stored)), power_of_two=power_of_two).isnan().cpu()
    column = torch.arange(160) == 7
    assert torch.equal(lost, (topk_ids == 0) | ((topk_ids == 1) & column)) and lost.sum(dim=1).unique().numel() == 3
