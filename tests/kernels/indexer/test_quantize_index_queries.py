"""FP8 index queries against float64: rotation of the first dimensions, transform, quantisation."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from caches import hadamard_matrix, need_memory, turned
from dsa_engine.kernels.formats.cache_format import FP8, index_key_format
from dsa_engine.kernels.indexer.quantize_index_queries import quantize_index_queries
from dsa_engine.kernels.rows.store_index_keys import store_index_keys
from dsa_engine.kernels.runtime.launch import INTERPRETED

Error = Callable[[torch.Tensor, torch.Tensor], float]


def make(
    tokens: int, heads: int, dim: int, rotated: int, dtype: torch.dtype, interleaved: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, cosines, sines, and in float64 the queries turned and transformed."""
    g = torch.Generator().manual_seed(0)
    q = (torch.randn(tokens, heads, dim, generator=g) * 3).to(dtype)
    angle = torch.rand(tokens, rotated // 2, generator=g).double() * 6
    first = turned(q[..., :rotated], angle, interleaved)
    wanted = torch.cat((first, q[..., rotated:].double()), dim=-1) @ hadamard_matrix(dim) * dim**-0.5
    return q, angle.cos().float(), angle.sin().float(), wanted


def quantize(
    q: torch.Tensor, *turns: torch.Tensor, power_of_two: bool = False, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales: head weights of one leave them as they are."""
    weights = torch.ones(q.shape[:2], device=q.device)
    key_format = index_key_format(q.shape[2], FP8, power_of_two)
    return quantize_index_queries(q, weights, *turns, key_format=key_format, **options)


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize(
    "shape, rotated",
    [
        ((3, 64, 128), 64),  # DeepSeek-V3.2
        ((5, 32, 128), 64),  # GLM-5
        *(((1, 12, 32), 8), ((67, 1, 16), 16), ((2, 70, 64), 24), ((0, 64, 128), 64)),
    ],
)
def test_queries(
    shape: tuple[int, int, int], rotated: int, interleaved: bool, power_of_two: bool, dtype: torch.dtype, device: str
) -> None:
    q, cos, sin, wanted = make(*shape, rotated, dtype, interleaved)
    values, scales = quantize(
        q.to(device), cos.to(device), sin.to(device), interleaved=interleaved, power_of_two=power_of_two
    )
    assert values.dtype == torch.float8_e4m3fn and values.shape == shape
    assert scales.dtype == torch.float32 and scales.shape == shape[:2]
    values, scales = values.cpu(), scales.cpu()
    largest, slack = wanted.abs().amax(dim=-1), 4 * torch.finfo(dtype).eps
    if power_of_two:
        assert all(math.frexp(scale)[0] == 0.5 for scale in scales.flatten().tolist())
        assert bool((scales * 448 >= largest * (1 - slack)).all() and (scales * 224 <= largest * (1 + slack)).all())
    else:
        torch.testing.assert_close(scales.double() * 448, largest, rtol=slack, atol=0)
    error = (values.double() * scales.double()[..., None] - wanted).abs()
    assert bool((error <= wanted.abs() / 16 + scales[..., None] / 900 + slack * largest[..., None]).all())


@pytest.mark.parametrize("strided", [False, True])
def test_head_weights(strided: bool, dtype: torch.dtype, device: str) -> None:
    """One product in float32 with each scale: bit by bit. Some weights are zero; rows may lie apart."""
    q, cos, sin, _ = make(5, 12, 32, 8, dtype, False)
    weights = torch.randn(5, 30, generator=torch.Generator().manual_seed(1)).to(device)
    weights = weights[:, 3:15] if strided else weights[:, 3:27:2].contiguous()
    weights[2, 4:6] = torch.tensor([0.0, -0.0])
    given = q.to(device), cos.to(device), sin.to(device)
    codes, scales = quantize(*given, interleaved=False)
    key_format = index_key_format(32, FP8)
    same, weighted = quantize_index_queries(given[0], weights, *given[1:], key_format=key_format, interleaved=False)
    assert torch.equal(same.view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(weighted.view(torch.int32), (weights * scales).view(torch.int32))


def test_more_tiles_than_programs(device: str) -> None:
    """Every program takes several tiles."""
    tokens = 40 if INTERPRETED else 2000
    q, cos, sin, _ = make(tokens, 64, 16, 8, torch.float16, False)
    turns = cos.to(device), sin.to(device)
    values, scales = quantize(q.to(device), *turns, interleaved=False)
    for token in (0, tokens // 2, tokens - 1):
        part = slice(token, token + 1)
        alone, scale = quantize(q[part].to(device), turns[0][part], turns[1][part], interleaved=False)
        assert torch.equal(values[part].view(torch.uint8), alone.view(torch.uint8))
        assert torch.equal(scales[part], scale)


def test_products_with_fp8_keys_are_those_of_queries_and_keys(device: str, relative_error: Error) -> None:
    """The purpose of the transform: it is applied to both sides, and the score stays."""
    q, cos, sin, _ = make(3, 8, 128, 64, torch.float16, False)
    g = torch.Generator().manual_seed(1)
    projected = torch.randn(3, 128, generator=g).half().to(device)
    turns, ones = (cos.to(device), sin.to(device)), torch.ones(128, device=device)
    rows = torch.empty(3, 132, dtype=torch.uint8, device=device)
    plain = torch.empty(3, 128, dtype=torch.float16, device=device)
    for out, stored in ((rows, FP8), (plain, torch.float16)):
        key_format = index_key_format(128, stored)
        store_index_keys(projected, ones, 0 * ones, 1e-6, *turns, out, key_format=key_format, interleaved=False)
    values, scales = quantize(q.to(device), *turns, interleaved=False)
    keys = rows[:, :128].view(torch.float8_e4m3fn).double() * rows[:, 128:].contiguous().view(torch.float32).double()
    got = torch.einsum("thd,sd->ths", values.double() * scales.double()[..., None], keys)
    half, x = 32, q.double()
    a, b = x[..., :half], x[..., half : 2 * half]
    c, s = cos.double()[:, None], sin.double()[:, None]
    turned = torch.cat((a * c - b * s, b * c + a * s, x[..., 64:]), dim=-1)
    assert relative_error(got, torch.einsum("thd,sd->ths", turned, plain.double().cpu())) < 0.06


def test_offsets_beyond_two_to_the_31(device: str) -> None:
    """Tokens 2^31 elements apart in a buffer of which no more is touched."""
    far = 2**31 + 64
    need_memory(device, 5 * far)
    q, cos, sin, _ = make(2, 4, 16, 8, torch.float16, True)
    x = torch.empty(far + 64, dtype=torch.float16, device=device).as_strided((2, 4, 16), (far, 16, 1))
    x.copy_(q)
    turns = cos.to(device), sin.to(device)
    got, near = (quantize(t, *turns, interleaved=True) for t in (x, q.to(device)))
    assert torch.equal(got[0].view(torch.uint8), near[0].view(torch.uint8)) and torch.equal(got[1], near[1])
