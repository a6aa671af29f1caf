"""The FP8 cache formats, which other kernels of the field use too. Both pools are uint8.

    latent row   [rank e4m3 | rank/128 float32 scales | rope bfloat16]      656 bytes for 512 + 64
    index keys   of one page: page_size · dim e4m3, then page_size float32 scales      132 bytes a key for 128

A scale belongs to 128 values of a latent row, and to a whole index key: ``value = e4m3 · scale``. The rotated part of a
latent row stays in bfloat16. A row of the index-key pool ``[pages, page_size, dim + 4]`` is no key: values of all keys
of a page lie before their scales. Keys and queries pass the Hadamard transform before they are quantised.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
import triton
import triton.language as tl

from dsa_engine.kernels.formats.e4m3 import decode_e4m3, quantize_tile
from dsa_engine.kernels.formats.hadamard import check_size, hadamard_of_parts, hadamard_reference, rows_for
from dsa_engine.kernels.formats.plain_cache import load_tile
from dsa_engine.kernels.formats.quantize import FP8, quantize_rows_reference
from dsa_engine.kernels.formats.row_format import Helpers, IndexKeyFormat, LatentFormat, RowFormat
from dsa_engine.kernels.runtime.launch import Chip

LATENT_BLOCK = 128  # values of a latent row that share a scale
SCALE_BYTES = 4  # float32
_SCALED = tl.constexpr(LATENT_BLOCK)


@triton.jit
def value_columns(BLOCK: tl.constexpr):
    """A thread has 16 neighbouring values of a row, 32 bytes as numbers: all first halves come before all second
    halves, so that threads that write to shared memory at the same time write 16 bytes beside each other. In order they
    would meet in half of its banks."""
    index = tl.arange(0, BLOCK)
    columns = index % (BLOCK // 2) // 8 * 16 + index // (BLOCK // 2) * 8 + index % 8
    return tl.max_contiguous(tl.multiple_of(columns, 8), 8)


@triton.jit
def load_latents(
    pool, row, STRIDE: tl.constexpr,
    VALUE: tl.constexpr, ROTATED: tl.constexpr, BLOCK_VALUE: tl.constexpr, BLOCK_ROTATED: tl.constexpr,
):  # fmt: skip
    """Rows ``row [rows]`` (32 bits) of a pool of words: int32 words of four values ``[rows, BLOCK_VALUE / 128, 32]``,
    their float32 scales ``[rows, BLOCK_VALUE / 128]``, and words of two rotated numbers ``[rows, BLOCK_ROTATED / 2]``.
    STRIDE is in words. They are words because registers hold 32 bits: bytes that a loop carries would take four times
    as many. As in :mod:`.plain_cache`, no row is masked."""
    # In three dimensions a thread that reads 16 values reads their scale once.
    group = tl.arange(0, BLOCK_VALUE // 128)[None, :]
    first = pool + row[:, None].to(tl.int64) * STRIDE
    values = (first + group * 32)[:, :, None] + tl.arange(0, 32)[None, None, :]
    scales = first + VALUE // 4 + group
    if VALUE == BLOCK_VALUE:
        words = tl.load(values)
        scale = tl.load(scales)
    else:
        words = tl.load(values, mask=(group < VALUE // 128)[:, :, None], other=0)
        scale = tl.load(scales, mask=group < VALUE // 128, other=0)
    column = tl.arange(0, BLOCK_ROTATED // 2)
    pairs = load_tile(first + VALUE // 4 + VALUE // 128, column, ROTATED // 2, BLOCK_ROTATED // 2)
    return words, scale.to(tl.float32, bitcast=True), pairs


@triton.jit
def expand_latents(words, scale, pairs, dtype: tl.constexpr, E4M3: tl.constexpr):
    """The results of :func:`load_latents` as those of plain rows, in ``dtype``, with the values in the order of
    :func:`value_columns`."""
    even = tl.join(words.to(tl.uint8), (words >> 16).to(tl.uint8))
    odd = tl.join((words >> 8).to(tl.uint8), (words >> 24).to(tl.uint8))
    codes = tl.join(even, odd).reshape(words.shape[0], words.shape[1], 128)
    if E4M3:
        numbers = codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        # As bits of float16, whose exponent has a bit more: a number 2^8 times too small, subnormals included.
        bits = ((codes & 0x80).to(tl.uint16) << 8) | ((codes & 0x7F).to(tl.uint16) << 7)
        numbers = bits.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    halves = (numbers * scale[:, :, None]).to(dtype).reshape(words.shape[0], words.shape[1] * 8, 2, 8)
    tile = tl.permute(halves, (0, 2, 1, 3)).reshape(words.shape[0], words.shape[1] * 128)
    rotated = tl.join(pairs.to(tl.uint16), (pairs >> 16).to(tl.uint16)).to(tl.bfloat16, bitcast=True)
    return tile, rotated.to(dtype).reshape(pairs.shape[0], 2 * pairs.shape[1])


@triton.jit
def to_bfloat16(x, CONVERTS: tl.constexpr):
    """Rounds to nearest, ties to even; the conversion of Triton's interpreter would cut off instead."""
    full = x.to(tl.float32)
    if not CONVERTS:
        bits = full.to(tl.int32, bitcast=True)
        full = ((bits + 0x7FFF + ((bits >> 16) & 1)) & ~0xFFFF).to(tl.float32, bitcast=True)
    return full.to(tl.bfloat16)


@triton.jit
def store_latents(
    target, column, latent, a, b, keep,
    RANK: tl.constexpr, ROTATED_AT: tl.constexpr, POWER_OF_TWO: tl.constexpr, CONVERTS: tl.constexpr,
):  # fmt: skip
    ROWS: tl.constexpr = latent.shape[0]
    PADDED: tl.constexpr = latent.shape[1]
    BLOCKS: tl.constexpr = PADDED // _SCALED
    codes, scales = quantize_tile(tl.reshape(latent.to(tl.float32), (ROWS * BLOCKS, _SCALED)), POWER_OF_TWO, CONVERTS)
    tl.store(target + column, tl.reshape(codes, (ROWS, PADDED)), mask=keep & (column < RANK))
    block = tl.arange(0, BLOCKS)[None, :]
    at_scales = (target + RANK).to(tl.pointer_type(tl.float32))
    tl.store(at_scales + block, tl.reshape(scales, (ROWS, BLOCKS)), mask=keep & (block < RANK // _SCALED))
    at_rope = (target + ROTATED_AT).to(tl.pointer_type(tl.bfloat16))
    return at_rope, to_bfloat16(a, CONVERTS), to_bfloat16(b, CONVERTS)


@triton.jit
def encode_keys(
    a, b, rest, HALF: tl.constexpr, PADDED: tl.constexpr, DIM: tl.constexpr, REST_PADDED: tl.constexpr,
    INTERLEAVED: tl.constexpr, POWER_OF_TWO: tl.constexpr, CONVERTS: tl.constexpr,
):  # fmt: skip
    key = hadamard_of_parts(a, b, rest, HALF, PADDED, DIM, REST_PADDED, INTERLEAVED)
    return quantize_tile(key.to(a.dtype).to(tl.float32), POWER_OF_TWO, CONVERTS)


@triton.jit
def operand(values):
    """Chips that know no e4m3 are given its codes, which float16 holds exactly."""
    if values.dtype == tl.uint8:
        values = decode_e4m3(values, False).to(tl.float16)
    return values


class _FP8(RowFormat):
    dtype = FP8
    coded = True
    alignment = SCALE_BYTES
    name = "fp8"


@dataclass(frozen=True)
class FP8Latents(_FP8, LatentFormat):
    """Raises ``ValueError`` for a rank that is no multiple of 128, or for an odd number of rotated numbers."""

    power_of_two: bool = False

    helpers = Helpers(True, value_columns, load_latents, expand_latents, store_latents)
    least_block = LATENT_BLOCK

    def __post_init__(self) -> None:
        if self.rank % LATENT_BLOCK or self.rank == 0:
            raise ValueError(f"an FP8 latent pool needs a rank that is a multiple of {LATENT_BLOCK}, not {self.rank}")
        if self.rope % 2:
            raise ValueError(f"an FP8 latent pool needs an even number of rotated numbers, not {self.rope}")

    @cached_property
    def columns(self) -> int:
        return self.rotated_at + 2 * self.rope

    @cached_property
    def rotated_at(self) -> int:
        return self.rank + SCALE_BYTES * (self.rank // LATENT_BLOCK)

    def pack(self, rows: torch.Tensor) -> torch.Tensor:
        values, scales = quantize_rows_reference(rows[..., : self.rank], LATENT_BLOCK, self.power_of_two)
        rope = rows[..., self.rank :].to(torch.bfloat16).contiguous()
        return torch.cat((values.view(torch.uint8), scales.view(torch.uint8), rope.view(torch.uint8)), dim=-1)

    def unpack(self, rows: torch.Tensor) -> torch.Tensor:
        values, scales, rope = rows.tensor_split((self.rank, self.rotated_at), dim=-1)
        blocks = values.contiguous().view(FP8).float().unflatten(-1, (-1, LATENT_BLOCK))
        latent = blocks * scales.contiguous().view(torch.float32)[..., None]
        return torch.cat((latent.flatten(-2), rope.contiguous().view(torch.bfloat16).float()), dim=-1)


@dataclass(frozen=True)
class FP8IndexKeys(_FP8, IndexKeyFormat):
    """Raises ``ValueError`` for a size that is no power of two from 4 on: the Hadamard transform needs a power of two,
    and scales begin at multiples of 4 bytes."""

    power_of_two: bool = False

    helpers = Helpers(True, encode=encode_keys, operand=operand)
    least_part = 16

    def __post_init__(self) -> None:
        check_size(self.dim)
        if self.dim % SCALE_BYTES:
            raise ValueError(f"an FP8 index key needs at least {SCALE_BYTES} numbers, not {self.dim}")

    @cached_property
    def columns(self) -> int:
        return self.dim + SCALE_BYTES

    def pack(self, rows: torch.Tensor) -> torch.Tensor:
        pages = self.empty_pool(rows.shape[0], rows.shape[1], rows.device)
        values, scales = self.views(pages)
        codes, factors = quantize_rows_reference(rows, self.dim, self.power_of_two)
        values.copy_(codes)
        scales.copy_(factors.squeeze(-1))
        return pages

    def unpack(self, rows: torch.Tensor) -> torch.Tensor:
        values, scales = self.views(rows)
        return values.float() * scales[..., None]

    def encode(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return quantize_rows_reference(hadamard_reference(rows, self.dim**-0.5), self.dim, self.power_of_two)

    def views(self, pool: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        pages, page_size, row = pool.shape
        flat = pool.view(pages, page_size * row)
        border = page_size * (row - SCALE_BYTES)
        values = flat[:, :border].view(FP8).unflatten(-1, (page_size, row - SCALE_BYTES))
        return values, flat[:, border:].view(torch.float32)

    def operands(self, q: torch.Tensor, keys: torch.Tensor, chip: Chip) -> tuple[torch.Tensor, torch.Tensor]:
        return (q, keys) if chip.capability >= 89 else (q.view(torch.uint8), keys.view(torch.uint8))

    def rows_at_once(self, x: torch.Tensor) -> int:
        return rows_for(x)
