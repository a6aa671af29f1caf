"""Sums of rows that come back as codes and scales, against float64."""

from __future__ import annotations

import pytest
import torch

from dsa_engine.kernels.formats.quantize import codes_and_scales, quantize_tokens
from dsa_engine.kernels.moe.combine import combine
from dsa_engine.kernels.moe.combine_codes import combine_codes


@pytest.mark.parametrize("hidden", [128, 160, 1284])
def test_sums_of_codes(hidden: int, device: str) -> None:
    """Rows left out, one token, and rows that no token names and that hold anything."""
    generator = torch.Generator().manual_seed(hidden)
    rows = torch.randn(17, hidden, generator=generator) * torch.logspace(-3, 3, 17)[:, None]
    words = quantize_tokens(rows.to(device), True)
    codes, scales = (one.cpu() for one in codes_and_scales(words, hidden))
    exact = codes.double() * scales.double().repeat_interleave(128, dim=1)[:, :hidden]
    assert (exact - rows).norm() < 0.04 * rows.norm()
    words[3] = -1  # NaN, which no token names
    named = torch.tensor([r for r in range(17) if r != 3] * 3)
    pairs = named[torch.randperm(48, generator=generator)].view(16, 3).int()
    pairs[::4, 1], pairs[5] = -1, -1
    wanted = (exact[pairs.clamp(min=0).long()] * (pairs >= 0)[..., None]).sum(dim=1)
    ours = combine_codes(words, pairs.to(device), hidden, torch.float32).cpu()
    torch.testing.assert_close(ours.double(), wanted, rtol=1e-5, atol=1e-6 * float(wanted.abs().max()))
    assert not ours[5].any()
    plain = exact.float().to(device)
    assert torch.equal(ours, combine(plain, pairs.to(device)).cpu()), "the bits of the sum of plain rows"
    assert combine_codes(words, pairs[:1].to(device), hidden, torch.bfloat16).dtype == torch.bfloat16
    assert combine_codes(words[:0], pairs[:0].to(device), hidden, torch.float32).shape == (0, hidden)
