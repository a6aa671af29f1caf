"""Digests of the parts of tensors that a rank reads, by which ranks notice that their checkpoints differ.

They are to notice mistakes (another version, a merged adapter, a damaged disk), not attacks, so they may cost little:
sums of 64-bit words are as fast as memory, ten times as fast as a cryptographic digest or a CRC.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from hashlib import blake2b

import torch

START_ELEMENTS = 4096  # the elements of a part that another rank compares, if one rank reads it
_WIDTH = 251  # 64-bit words of a sum


@dataclass(frozen=True)
class Part:
    """A rectangle of a stored tensor; scales are tensors too."""

    name: str
    start: tuple[int, ...]  # in every dimension
    size: tuple[int, ...]


class PartDigests:
    """Digests of parts as they are read, in 63 bits.

    Attributes:
        of: for each part its digest, and that of its first elements (``CheckpointReader.read_start``).
        seconds, bytes: time that they took, and bytes that they cover.
    """

    def __init__(self) -> None:
        self.of: dict[Part, tuple[int, int]] = {}
        self.seconds = 0.0
        self.bytes = 0

    def add(self, part: Part, data: torch.Tensor) -> None:
        """Adds the CPU tensor ``data``, the part as stored."""
        begun = time.perf_counter()
        start = data[:1, :START_ELEMENTS] if data.dim() == 2 else data[:START_ELEMENTS]
        self.of[part] = digest(data), digest(start)
        self.bytes += data.nbytes
        self.seconds += time.perf_counter() - begun


def digest(data: torch.Tensor) -> int:
    """63 bits that depend on every byte of a CPU tensor.

    The sums of ``_WIDTH`` words each are digested, and the bytes after the last of them; so another order is noticed
    except within such a group, of 2 KB.
    """
    raw = data.contiguous().view(-1).view(torch.uint8)
    if raw.storage_offset() % 8:  # a view of a file; words must begin at multiples of 8 bytes
        raw = raw.clone()
    summed = raw.numel() // (8 * _WIDTH) * (8 * _WIDTH)
    sums = raw[:summed].view(torch.int64).view(-1, _WIDTH).sum(1)
    about = blake2b(sums.numpy().data, digest_size=8)
    about.update(raw[summed:].numpy().data)
    return int.from_bytes(about.digest(), "little") >> 1
