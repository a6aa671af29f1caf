"""Latent rows in their slots, against float64: norm, rotation, page, and the bytes of FP8 rows."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from caches import need_memory, turned
from dsa_engine.kernels.formats.cache_format import FP8, latent_format
from dsa_engine.kernels.formats.row_format import LatentFormat
from dsa_engine.kernels.rows.store_latent import store_latent

pytestmark = pytest.mark.usefixtures("on_a_cpu")

Error = Callable[[torch.Tensor, torch.Tensor], float]

EPS = 1e-6
SIZES = [(512, 64), (384, 64), (32, 8), (24, 10)]  # released models; a rank that is no power of two; tiny


class Rows:
    """Random input of ``store_latent`` and, in float64, the rows that it makes."""

    def __init__(self, tokens: int, rank: int, rope: int, dtype: torch.dtype, interleaved: bool, seed: int = 0):
        g = torch.Generator().manual_seed(seed)
        self.compressed = (torch.randn(tokens, rank + rope, generator=g) * 3).to(dtype)
        self.weight = (1 + 0.3 * torch.randn(rank, generator=g)).to(dtype)
        angle = torch.rand(tokens, rope // 2, generator=g).double() * 6
        self.cos, self.sin = angle.cos().float(), angle.sin().float()
        x = self.compressed.double()
        latent = x[:, :rank]
        latent = self.weight.double() * latent / ((latent * latent).mean(-1, keepdim=True) + EPS).sqrt()
        self.wanted = torch.cat((latent, turned(x[:, rank:], angle, interleaved)), dim=-1)
        self.interleaved = interleaved

    def store(self, out: torch.Tensor, slots: list[int] | None = None, power_of_two: bool = False) -> None:
        device = out.device
        compressed, weight, cos, sin = (t.to(device) for t in (self.compressed, self.weight, self.cos, self.sin))
        at = None if slots is None else torch.tensor(slots, dtype=torch.int32, device=device)
        row_format = format_of(out, weight.shape[0], 2 * cos.shape[1], power_of_two)
        store_latent(compressed, weight, EPS, cos, sin, out, at, row_format=row_format, interleaved=self.interleaved)


def format_of(out: torch.Tensor, rank: int, rope: int, power_of_two: bool = False) -> LatentFormat:
    """FP8 rows in bytes, plain rows else."""
    return latent_format(rank, rope, FP8 if out.dtype == torch.uint8 else out.dtype, power_of_two)


def scattered_slots(tokens: int, slots: int, dropped: int = 3) -> list[int]:
    """Distinct slots in no order, every ``dropped``-th of them −1."""
    order = torch.randperm(slots, generator=torch.Generator().manual_seed(slots))[:tokens].tolist()
    return [-1 if i % dropped == dropped - 1 else slot for i, slot in enumerate(order)]


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("rank, rope", SIZES)
def test_scattered_slots(
    rank: int, rope: int, interleaved: bool, dtype: torch.dtype, bound: float, device: str, relative_error: Error
) -> None:
    rows = Rows(11, rank, rope, dtype, interleaved)
    pool = torch.full((4, 5, rank + rope), float("nan"), dtype=dtype, device=device)
    slots = scattered_slots(11, 20)
    rows.store(pool, slots)
    flat = pool.view(20, -1)
    stored_rows = [i for i in range(11) if slots[i] >= 0]
    stored = flat[[slots[i] for i in stored_rows]]
    assert relative_error(stored[:, :rank], rows.wanted[stored_rows, :rank]) < bound
    assert relative_error(stored[:, rank:], rows.wanted[stored_rows, rank:]) < bound
    untouched = [slot for slot in range(20) if slot not in slots]
    assert bool(flat[untouched].isnan().all())


def test_plain_rows_of_a_wider_buffer(device: str, relative_error: Error) -> None:
    """The part of the buffer that context parallelism gathers, whose other part holds index keys."""
    rows = Rows(7, 32, 8, torch.float32, True)
    buffer = torch.full((9, 40 + 24), -7.0, device=device)
    rows.store(buffer[:7, :40])
    assert relative_error(buffer[:7, :40], rows.wanted) < 1e-5
    assert bool((buffer[:, 40:] == -7).all()) and bool((buffer[7:] == -7).all())


def test_a_strided_input_and_int64_slots(device: str, relative_error: Error) -> None:
    rows = Rows(5, 32, 8, torch.float32, True)
    wide = torch.full((5, 50), float("nan"), device=device)
    wide[:, 3:43] = rows.compressed
    pool = torch.zeros(2, 4, 40, device=device)
    slots = torch.tensor([7, 0, 3, -1, 2], device=device)
    turns = rows.cos.to(device), rows.sin.to(device)
    row_format = latent_format(32, 8, torch.float32)
    store_latent(
        wide[:, 3:43], rows.weight.to(device), EPS, *turns, pool, slots, row_format=row_format, interleaved=True
    )
    assert relative_error(pool.view(8, -1)[[7, 0, 3, 2]], rows.wanted[[0, 1, 2, 4]]) < 1e-5


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("rank, rope", [(512, 64), (384, 64), (128, 16)])
def test_fp8_rows(rank: int, rope: int, power_of_two: bool, dtype: torch.dtype, device: str) -> None:
    rows = Rows(6, rank, rope, dtype, True)
    blocks = rank // 128
    pool = torch.full((2, 4, rank + 4 * blocks + 2 * rope), 255, dtype=torch.uint8, device=device)
    slots = [5, -1, 0, 3, 7, 2]
    rows.store(pool, slots, power_of_two=power_of_two)
    flat = pool.view(8, -1).cpu()
    assert bool((flat[[1, 4, 6]] == 255).all())
    step = torch.finfo(dtype).eps
    for token, slot in enumerate(slots):
        if slot < 0:
            continue
        row, wanted = flat[slot], rows.wanted[token]
        scales = row[rank : rank + 4 * blocks].clone().view(torch.float32)
        for i, scale in enumerate(scales.tolist()):
            part = slice(128 * i, 128 * (i + 1))
            largest = float(wanted[part].abs().max())
            if power_of_two:
                assert math.frexp(scale)[0] == 0.5 and largest * (1 - 2 * step) <= scale * 448
                assert scale * 224 <= largest * (1 + 2 * step)
            else:
                assert scale * 448 == pytest.approx(largest, rel=2 * step)
            values = row[part].view(torch.float8_e4m3fn).double() * scale
            # Half a step of e4m3, and the rounding to dtype before it.
            assert bool(((values - wanted[part]).abs() <= wanted[part].abs() * (1 / 16 + 2 * step) + scale / 900).all())
        k_rope = row[rank + 4 * blocks :].clone().view(torch.bfloat16).double()
        torch.testing.assert_close(k_rope, wanted[rank:], rtol=2**-8 + 2 * step, atol=1e-3)


@pytest.mark.parametrize("power_of_two", [False, True])
def test_both_ways_to_an_fp8_cache_give_the_same_bytes(power_of_two: bool, dtype: torch.dtype, device: str) -> None:
    """At once, or as rows that are quantised later."""
    rows = Rows(9, 256, 32, dtype, True)
    plain = torch.empty(9, 288, dtype=dtype, device=device)
    packed = torch.empty(9, 328, dtype=torch.uint8, device=device)
    rows.store(plain)
    rows.store(packed, power_of_two=power_of_two)
    # Two kernels on a GPU may sum a row in different orders, and then a norm differs in its last bit at times.
    different = (packed != latent_format(256, 32, FP8, power_of_two).pack(plain)).float().mean()
    assert different == 0 if device == "cpu" else different < 0.01


def test_fp8_rows_of_a_wider_buffer(device: str) -> None:
    rows = Rows(5, 128, 16, torch.float16, False)
    alone = torch.empty(5, 164, dtype=torch.uint8, device=device)
    buffer = torch.full((5, 300), 255, dtype=torch.uint8, device=device)
    rows.store(alone)
    rows.store(buffer[:, 4:168])
    assert torch.equal(buffer[:, 4:168], alone)
    assert bool((buffer[:, :4] == 255).all()) and bool((buffer[:, 168:] == 255).all())


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("tokens", [0, 1, 4])
def test_no_token_and_no_slot(tokens: int, fp8: bool, device: str) -> None:
    pool = torch.full((2, 2, 164 if fp8 else 144), 9, dtype=torch.uint8 if fp8 else torch.float32, device=device)
    Rows(tokens, 128, 16, torch.float32, True).store(pool, [-1] * tokens)
    assert bool((pool == 9).all())


@pytest.mark.parametrize("fp8", [False, True])
def test_offsets_beyond_two_to_the_31(fp8: bool, device: str, relative_error: Error) -> None:
    """The last pages of a pool of more than 2^31 elements, of which no more is touched."""
    width, dtype = (656, torch.uint8) if fp8 else (576, torch.float16)
    pages = 2**31 // (64 * width) + 2
    need_memory(device, 1.1 * pages * 64 * width * dtype.itemsize)
    rows = Rows(2, 512, 64, torch.float16, True)
    pool = torch.empty(pages, 64, width, dtype=dtype, device=device)
    pool[-1] = 0
    rows.store(pool, [pages * 64 - 1, pages * 64 - 3])
    last = pool[-1, [63, 61]].cpu()
    if fp8:
        near = torch.empty(2, 656, dtype=torch.uint8, device=device)
        rows.store(near)
        assert torch.equal(last, near.cpu())
    else:
        assert relative_error(last, rows.wanted) < 2e-3
    assert not pool[-1, 62].any()


def test_the_norm_is_rounded_before_its_weight() -> None:
    """The model's definition rounds like this."""
    rows = Rows(8, 64, 8, torch.bfloat16, True)
    out = torch.empty(8, 72, dtype=torch.bfloat16)
    rows.store(out)
    latent = rows.compressed[:, :64].float()
    normed = (latent * torch.rsqrt((latent * latent).mean(-1, keepdim=True) + EPS)).bfloat16()
    assert torch.equal(out[:, :64], rows.weight * normed)
