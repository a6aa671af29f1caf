"""Index keys in their slots, against float64: LayerNorm, rotation of the first dimensions, page, and FP8 pages."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from caches import hadamard_matrix, need_memory, turned
from dsa_engine.kernels.formats.cache_format import FP8, index_key_format
from dsa_engine.kernels.formats.row_format import IndexKeyFormat
from dsa_engine.kernels.rows.store_index_keys import store_index_keys

pytestmark = pytest.mark.usefixtures("on_a_cpu")

Error = Callable[[torch.Tensor, torch.Tensor], float]

EPS = 1e-6
SIZES = [(128, 64), (24, 8), (16, 16), (40, 12), (64, 2)]  # released models; tiny; all rotated; odd; hardly any


def format_of(out: torch.Tensor, dim: int, power_of_two: bool = False) -> IndexKeyFormat:
    """FP8 keys in bytes, plain keys else."""
    return index_key_format(dim, FP8 if out.dtype == torch.uint8 else out.dtype, power_of_two)


class Keys:
    """Random input of ``store_index_keys`` and, in float64, the keys that it makes."""

    def __init__(self, tokens: int, dim: int, rotated: int, dtype: torch.dtype, interleaved: bool):
        g = torch.Generator().manual_seed(0)
        self.projected = (torch.randn(tokens, dim, generator=g) * 3 + 1).to(dtype)
        self.weight, self.bias = 1 + 0.3 * torch.randn(dim, generator=g), torch.randn(dim, generator=g)
        angle = torch.rand(tokens, rotated // 2, generator=g).double() * 6
        self.cos, self.sin = angle.cos().float(), angle.sin().float()
        self.interleaved = interleaved
        x = self.projected.double()
        centred = x - x.mean(-1, keepdim=True)
        normed = centred / ((centred * centred).mean(-1, keepdim=True) + EPS).sqrt() * self.weight + self.bias
        first = turned(normed[:, :rotated], angle, interleaved)
        self.wanted = torch.cat((first, normed[:, rotated:]), dim=-1)
        self.transformed = self.wanted @ hadamard_matrix(dim) * dim**-0.5 if dim & (dim - 1) == 0 else None

    def store(self, out: torch.Tensor, slots: list[int] | None = None, power_of_two: bool = False) -> None:
        tensors = (self.projected, self.weight, self.bias, self.cos, self.sin)
        projected, weight, bias, cos, sin = (t.to(out.device) for t in tensors)
        at = None if slots is None else torch.tensor(slots, dtype=torch.int32, device=out.device)
        store_index_keys(
            projected, weight, bias, EPS, cos, sin, out, at,
            key_format=format_of(out, projected.shape[1], power_of_two), interleaved=self.interleaved,
        )  # fmt: skip


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("dim, rotated", SIZES)
def test_scattered_slots(
    dim: int, rotated: int, interleaved: bool, dtype: torch.dtype, bound: float, device: str, relative_error: Error
) -> None:
    keys = Keys(19, dim, rotated, dtype, interleaved)
    pool = torch.full((5, 7, dim), float("nan"), dtype=dtype, device=device)
    order = torch.randperm(35, generator=torch.Generator().manual_seed(0))[:19].tolist()
    slots = [-1 if i % 4 == 3 else slot for i, slot in enumerate(order)]
    keys.store(pool, slots)
    flat = pool.view(35, dim)
    stored_rows = [i for i in range(19) if slots[i] >= 0]
    assert relative_error(flat[[slots[i] for i in stored_rows]], keys.wanted[stored_rows]) < bound
    assert bool(flat[[slot for slot in range(35) if slot not in slots]].isnan().all())


def test_plain_rows_of_a_wider_buffer(device: str, relative_error: Error) -> None:
    keys = Keys(7, 24, 8, torch.float32, False)
    buffer = torch.full((9, 40 + 24), -7.0, device=device)
    keys.store(buffer[:7, 40:])
    assert relative_error(buffer[:7, 40:], keys.wanted) < 1e-5
    assert bool((buffer[:, :40] == -7).all()) and bool((buffer[7:] == -7).all())


def test_a_pool_of_another_dtype(device: str, relative_error: Error) -> None:
    keys = Keys(3, 24, 8, torch.float32, True)
    pool = torch.full((2, 4, 24), -7.0, dtype=torch.bfloat16, device=device)
    keys.store(pool, [6, -1, 0])
    flat = pool.view(8, 24)
    assert relative_error(flat[[6, 0]], keys.wanted[[0, 2]]) < 2**-8
    assert bool((flat[[1, 2, 3, 4, 5, 7]] == -7).all())


def check_fp8(
    values: torch.Tensor, scales: torch.Tensor, wanted: torch.Tensor, power_of_two: bool, step: float
) -> None:
    """e4m3 ``values [keys, dim]`` and ``scales [keys]`` against the transformed keys, known up to ``step`` of each."""
    largest = wanted.abs().amax(dim=-1)
    slack = 4 * step
    if power_of_two:
        assert all(math.frexp(scale)[0] == 0.5 for scale in scales.tolist())
        assert bool((scales * 448 >= largest * (1 - slack)).all() and (scales * 224 <= largest * (1 + slack)).all())
    else:
        torch.testing.assert_close(scales.double() * 448, largest, rtol=slack, atol=0)
    error = (values.double() * scales.double()[:, None] - wanted).abs()
    # Half a step of e4m3; the roundings before the transform spread over all dimensions.
    assert bool((error <= wanted.abs() / 16 + scales[:, None] / 900 + slack * largest[:, None]).all())


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("dim, rotated", [(128, 64), (64, 24), (16, 16)])
def test_fp8_pages(
    dim: int, rotated: int, interleaved: bool, power_of_two: bool, dtype: torch.dtype, device: str
) -> None:
    """A page holds the values of all keys, then their scales."""
    keys = Keys(6, dim, rotated, dtype, interleaved)
    pool = torch.full((3, 4, dim + 4), 255, dtype=torch.uint8, device=device)
    slots = [5, -1, 0, 3, 11, 7]
    keys.store(pool, slots, power_of_two=power_of_two)
    pages = pool.cpu().view(3, -1)
    values = pages[:, : 4 * dim].reshape(12, dim)
    scales = pages[:, 4 * dim :].contiguous().view(torch.float32).view(12)
    empty = [slot for slot in range(12) if slot not in slots]
    assert bool((values[empty] == 255).all()) and bool(scales[empty].isnan().all())
    stored_rows = [i for i in range(6) if slots[i] >= 0]
    at = [slots[i] for i in stored_rows]
    assert keys.transformed is not None
    step = torch.finfo(dtype).eps
    check_fp8(values[at].view(torch.float8_e4m3fn), scales[at], keys.transformed[stored_rows], power_of_two, step)


def test_fp8_rows_of_a_wider_buffer(device: str) -> None:
    """A plain row is the values and the scale, as a page of one key."""
    keys = Keys(70, 32, 8, torch.float16, False)
    buffer = torch.full((70, 60), 255, dtype=torch.uint8, device=device)
    keys.store(buffer[:, 20:56])
    pool = torch.full((70, 1, 36), 255, dtype=torch.uint8, device=device)
    keys.store(pool, list(range(70)))
    assert torch.equal(buffer[:, 20:56], pool[:, 0])
    assert bool((buffer[:, :20] == 255).all()) and bool((buffer[:, 56:] == 255).all())


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("tokens", [0, 1, 4])
def test_no_token_and_no_slot(tokens: int, fp8: bool, device: str) -> None:
    pool = torch.full((2, 2, 20 if fp8 else 16), 9, dtype=torch.uint8 if fp8 else torch.float32, device=device)
    Keys(tokens, 16, 8, torch.float32, True).store(pool, [-1] * tokens)
    assert bool((pool == 9).all())


@pytest.mark.parametrize("fp8", [False, True])
def test_offsets_beyond_two_to_the_31(fp8: bool, device: str, relative_error: Error) -> None:
    """The last page of a pool of more than 2^31 elements, of which no more is touched."""
    width, dtype = (132, torch.uint8) if fp8 else (128, torch.float16)
    pages = 2**31 // (64 * width) + 2
    need_memory(device, 1.1 * pages * 64 * width * dtype.itemsize)
    keys = Keys(2, 128, 64, torch.float16, False)
    pool = torch.empty(pages, 64, width, dtype=dtype, device=device)
    pool[-1] = 0
    keys.store(pool, [pages * 64 - 1, pages * 64 - 64])
    last = pool[-1].cpu()
    if fp8:
        assert keys.transformed is not None
        page = last.flatten()
        values = page[: 64 * 128].view(64, 128)[[63, 0]].view(torch.float8_e4m3fn)
        check_fp8(values, page[64 * 128 :].view(torch.float32)[[63, 0]], keys.transformed, False, 2**-10)
    else:
        assert relative_error(last[[63, 0]], keys.wanted) < 2e-3
