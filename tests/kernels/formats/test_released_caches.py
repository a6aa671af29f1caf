"""FP8 caches against DeepSeek's released definition, code by code: bfloat16 in, the same e4m3 numbers and scales out.

activations and cache rows   amax, at least 1e-4, times 1/448; up to a power of two; x / scale, cut off at ±448
latent rows                  the normed and rounded part in blocks of 128; the rotated part stays bfloat16
index keys and queries       rotated and rounded, Hadamard transform, rounded to bfloat16, one block of 128
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from caches import hadamard_matrix
from dsa_engine.kernels.formats.cache_format import FP8, index_key_format, latent_format
from dsa_engine.kernels.indexer.quantize_index_queries import quantize_index_queries
from dsa_engine.kernels.rows.store_index_keys import store_index_keys
from dsa_engine.kernels.rows.store_latent import store_latent

EPS = 1e-6
TOKENS, RANK, ROPE, DIM = 40, 512, 64, 128


def released_quantization(x: torch.Tensor, power_of_two: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """uint8 codes and scales of the rows of ``x [rows, 128]``, bfloat16."""
    full = x.float()
    largest = full.abs().amax(dim=1, keepdim=True).clamp(min=1e-4)
    scale = largest * torch.tensor(1 / 448, dtype=torch.float32, device=x.device)
    if power_of_two:
        bits = scale.view(torch.int32)
        exponent = ((bits >> 23) & 255) - 127 + ((bits & 0x7FFFFF) != 0).int()
        scale = ((exponent + 127) << 23).view(torch.float32)
    return (full / scale).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8), scale[:, 0]


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """``x [T, dim]`` turned as complex numbers in float32, and rounded."""
    full = x.float()
    pairs = full.unflatten(-1, (-1, 2)).unbind(-1) if interleaved else full.chunk(2, dim=-1)
    a, b = pairs[0] * cos - pairs[1] * sin, pairs[1] * cos + pairs[0] * sin
    return (torch.stack((a, b), dim=-1).flatten(1) if interleaved else torch.cat((a, b), dim=-1)).to(x.dtype)


def transformed(x: torch.Tensor) -> torch.Tensor:
    """The Hadamard transform of ``x [rows, 128]``, as a product with its matrix, rounded to bfloat16."""
    return ((x.double() @ hadamard_matrix(DIM).to(x.device)).float() * DIM**-0.5).bfloat16()


def angles(device: str) -> tuple[torch.Tensor, torch.Tensor]:
    angle = torch.rand(TOKENS, ROPE // 2, generator=torch.Generator().manual_seed(1)) * 6
    return angle.cos().to(device), angle.sin().to(device)


def on_a_grid(shape: tuple[int, ...], device: str) -> torch.Tensor:
    """Random bfloat16 numbers whose sums float32 holds exactly, so that no order of adding them matters."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(2)).bfloat16().float()
    return ((x * 256).round() / 256).bfloat16().to(device)


@pytest.mark.parametrize("power_of_two", [False, True])
def test_latent_rows(power_of_two: bool, device: str) -> None:
    g = torch.Generator().manual_seed(0)
    compressed = torch.randn(TOKENS, RANK + ROPE, generator=g) * (2 * torch.randn(TOKENS, 1, generator=g)).exp()
    compressed = compressed.bfloat16().to(device)
    compressed[3, :RANK] = 0
    weight = (1 + 0.3 * torch.randn(RANK, generator=g)).bfloat16().to(device)
    cos, sin = angles(device)
    rows = torch.empty(TOKENS, 656, dtype=torch.uint8, device=device)
    fp8, bf16 = (latent_format(RANK, ROPE, stored, power_of_two) for stored in (FP8, torch.bfloat16))
    store_latent(compressed, weight, EPS, cos, sin, rows, row_format=fp8, interleaved=True)
    plain = torch.empty(TOKENS, RANK + ROPE, dtype=torch.bfloat16, device=device)
    store_latent(compressed, weight, EPS, cos, sin, plain, row_format=bf16, interleaved=True)  # as a bfloat16 cache
    codes, scales = released_quantization(plain[:, :RANK].reshape(-1, 128), power_of_two)
    assert torch.equal(rows[:, :RANK].reshape(-1, 128), codes)
    assert torch.equal(rows[:, RANK : RANK + 16].contiguous().view(torch.float32).flatten(), scales)
    wanted = rotated(compressed[:, RANK:], cos, sin, interleaved=True)
    assert torch.equal(rows[:, RANK + 16 :].contiguous().view(torch.bfloat16), wanted)


@pytest.mark.parametrize("power_of_two", [False, True])
def test_index_queries(power_of_two: bool, device: str) -> None:
    heads = 16
    q = on_a_grid((TOKENS, heads, DIM), device)
    one = torch.ones(TOKENS, ROPE // 2, device=device)  # not rotated: the rounded result would lie on no grid
    weights = torch.ones(TOKENS, heads, device=device)  # then the scales are left
    codes, scales = quantize_index_queries(
        q, weights, one, 0 * one, key_format=index_key_format(DIM, FP8, power_of_two), interleaved=False
    )
    wanted, wanted_scales = released_quantization(transformed(q.flatten(0, 1)), power_of_two)
    assert torch.equal(codes.view(torch.uint8).flatten(0, 1), wanted)
    assert torch.equal(scales.flatten(), wanted_scales)


@pytest.mark.parametrize("power_of_two", [False, True])
def test_index_keys(power_of_two: bool, device: str) -> None:
    """Random keys through norm and rotation: sums in another order may round differently, and the test counts the
    differences."""
    g = torch.Generator().manual_seed(3)
    projected = (torch.randn(TOKENS, DIM, generator=g) * 3).bfloat16().to(device)
    weight, bias = (1 + 0.3 * torch.randn(DIM, generator=g)).to(device), torch.randn(DIM, generator=g).to(device)
    cos, sin = angles(device)
    rows = torch.empty(TOKENS, DIM + 4, dtype=torch.uint8, device=device)
    arguments = projected, weight, bias, EPS, cos, sin
    key_format = index_key_format(DIM, FP8, power_of_two)
    store_index_keys(*arguments, rows, key_format=key_format, interleaved=False)
    normed = F.layer_norm(projected.float(), (DIM,), weight, bias, EPS).bfloat16()
    keys = torch.cat((rotated(normed[:, :ROPE], cos, sin, interleaved=False), normed[:, ROPE:]), dim=-1)
    wanted, scales = released_quantization(transformed(keys), power_of_two)
    assert torch.equal(rows[:, DIM:].contiguous().view(torch.float32).flatten(), scales)
    assert float((rows[:, :DIM] != wanted).float().mean()) <= 2e-4
