"""Random weights of the right shape instead of a checkpoint's."""

from __future__ import annotations

import hashlib
import math

import torch

from dsa_engine.kernels.formats.quantize import E4M3_MAX, FP8
from dsa_engine.kernels.runtime.integers import cdiv
from dsa_engine.weights.tensors import Source

RANDOM_BLOCK_ELEMENTS = 1 << 22  # elements drawn from one generator

# Weights whose products are float32 whatever the checkpoint holds, which is bfloat16 (`layers.Float32OutputLinear`).
_HELD_IN_BFLOAT16 = ("mlp.gate.weight", "indexer.weights_proj.weight")

# For each dtype of codes (int32: packed INT4): the largest code, and a scale that makes random codes fit well.
_DUMMY_CODES = {FP8: (E4M3_MAX, 2.0**-12), torch.int8: (127.0, 2.0**-11), torch.int32: (7.0, 2.0**-8)}


class DummyReader:
    """Random weights of the right shape; nothing is read (``load_format="dummy"``).

    An element depends only on ``(seed, name, index)``, so any sharding gives the same model: a matrix is drawn in
    blocks of rows, each from its own generator, and a part draws only the blocks that it touches.
    """

    def __init__(self, seed: int = 0):
        self.seed = seed
        self.bytes_read = 0

    def load(self, source: Source) -> None:
        """Fills ``source.into``: norm weights with ones, biases with zeros, and matrices with normal values of std
        0.02, which codes have after scaling; the groups of INT4 columns are in order. What a checkpoint holds in
        bfloat16 is exact in it."""
        if source.scale_of is not None:
            source.into.fill_(_DUMMY_CODES[source.scale_of][1])
        elif source.name.endswith("_g_idx"):
            source.into.fill_(-1)  # columns in order
        elif source.holds_codes:
            fill_normal(source, self.seed, std=0.02 / _DUMMY_CODES[source.into.dtype][1])
        elif source.name.endswith("norm.weight"):
            source.into.fill_(1.0)
        elif source.name.endswith("bias"):
            source.into.zero_()
        else:
            fill_normal(source, self.seed, std=0.02)
            if source.name.endswith(_HELD_IN_BFLOAT16):
                source.into.copy_(source.into.bfloat16())


def fill_normal(source: Source, seed: int, std: float, mean: float = 0.0) -> None:
    """Fills ``source.into`` with normal values that depend on ``(seed, name, index)`` and the type of device only.

    Codes are rounded and clamped to their range.
    """
    row_elements = math.prod(source.shape[1:])
    block_rows = max(RANDOM_BLOCK_ELEMENTS // row_elements, 1)
    first, end = source.start[0], source.start[0] + source.into.shape[0]
    columns = tuple(slice(s, s + n) for s, n in zip(source.start[1:], source.into.shape[1:], strict=True))
    for block in range(first // block_rows, cdiv(end, block_rows)):
        top = block * block_rows
        rows = min(block_rows, source.shape[0] - top)
        generator = torch.Generator(source.into.device).manual_seed(stable_seed(seed, source.name, block))
        values = _block(source, (rows, *source.shape[1:]), generator, std, mean)
        low, high = max(first, top), min(end, top + rows)
        part = (slice(low - top, high - top), *columns)
        source.into[low - first : high - first].copy_(values[part])


def _block(source: Source, shape: tuple[int, ...], generator: torch.Generator, std: float, mean: float) -> torch.Tensor:
    device, dtype = source.into.device, source.into.dtype
    if dtype == torch.int32:  # eight packed codes, each value equally likely
        return torch.empty(shape, dtype=dtype, device=device).random_(-(1 << 31), (1 << 31) - 1, generator=generator)
    values = torch.empty(shape, device=device).normal_(mean, std, generator=generator)
    if source.holds_codes:
        largest = _DUMMY_CODES[dtype][0]
        values.clamp_(-largest, largest)
        if not dtype.is_floating_point:
            values.round_()
    return values


def stable_seed(*parts: object) -> int:
    """A 63-bit seed from the text of ``parts``, the same in every process (Python's ``hash`` is not)."""
    digest = hashlib.blake2b("\0".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
