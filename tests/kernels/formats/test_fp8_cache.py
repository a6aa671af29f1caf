"""The FP8 cache formats, byte by byte."""

from __future__ import annotations

import math
import struct

import pytest
import torch

from dsa_engine.kernels.formats.fp8_cache import FP8IndexKeys, FP8Latents
from dsa_engine.kernels.formats.quantize import quantize_rows


@pytest.mark.parametrize("power_of_two", [False, True])
def test_a_latent_row(power_of_two: bool) -> None:
    rows = torch.randn(5, 512 + 64, generator=torch.Generator().manual_seed(0)) * 3
    rows[1, 128:256] = 0.0
    row_format = FP8Latents(512, 64, power_of_two)
    packed = row_format.pack(rows)
    assert packed.dtype == torch.uint8 and packed.shape == (5, 656)
    for row, given in zip(packed, rows, strict=True):
        scales = struct.unpack("<4f", bytes(row[512:528].tolist()))
        for i, scale in enumerate(scales):
            block = given[128 * i : 128 * (i + 1)]
            largest = float(block.abs().max())
            assert scale * 448 >= largest * 0.999999
            assert not power_of_two or math.frexp(scale)[0] == 0.5
            values = row[128 * i : 128 * (i + 1)].view(torch.float8_e4m3fn).float() * scale
            # 3 bits of mantissa: half a step of 1/8 at most, and half of the smallest step, 2^-9, near zero.
            assert bool(((values - block).abs() <= block.abs() / 16 + scale * 2**-10).all())
        assert torch.equal(row[528:].view(torch.bfloat16), given[512:].bfloat16())
    unpacked = row_format.unpack(packed)
    assert unpacked.dtype == torch.float32 and not unpacked[1, 128:256].any()
    assert torch.equal(row_format.pack(unpacked), packed) or not power_of_two


def test_index_keys_lie_before_their_scales() -> None:
    page_size, dim = 4, 128
    pool = torch.zeros(3, page_size, dim + 4, dtype=torch.uint8)
    values, scales = FP8IndexKeys(dim).views(pool)
    assert values.shape == (3, page_size, dim) and scales.shape == (3, page_size)
    keys = torch.randn(page_size, dim, generator=torch.Generator().manual_seed(0))
    quantised, scale = quantize_rows(keys, dim, power_of_two=True)
    values[1], scales[1] = quantised, scale[:, 0]
    page = bytes(pool[1].flatten().tolist())
    assert page[:dim] == bytes(quantised[0].view(torch.uint8).tolist())
    assert struct.unpack("<4f", page[page_size * dim :]) == tuple(scale[:, 0].tolist())
    assert not pool[0].any() and not pool[2].any()
    error = quantised.float() * scale - keys
    assert float(error.norm() / keys.norm()) < 0.05
