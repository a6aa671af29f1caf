"""Files of pages with random bytes."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from pathlib import Path

from dsa_engine.engine.cache.folder import PageFolder, keys, pages

KEY = "0123456789abcdef" * 2
SIZES = (700, 0, 64, 4096, 1)
ROOT = os.geteuid() == 0

Parts = list[memoryview]


def filled(name: int, sizes: Sequence[int] = SIZES) -> Parts:
    """Parts with random bytes that depend on ``name``."""
    rng = random.Random(name)
    return [memoryview(bytearray(rng.randbytes(size))) for size in sizes]


def empty(sizes: Sequence[int] = SIZES) -> Parts:
    return [memoryview(bytearray(size)) for size in sizes]


def digest(name: int) -> bytes:
    return random.Random(-1 - name).randbytes(16)


def written(folder: PageFolder, *names: int, sizes: Sequence[int] = SIZES) -> None:
    for name in names:
        assert folder.write(digest(name), filled(name, sizes)) and folder.has(digest(name))


def reads(folder: PageFolder, name: int, sizes: Sequence[int] = SIZES) -> bool:
    """Whether a page is read, and is right if so."""
    parts = empty(sizes)
    done = folder.read(digest(name), parts)
    assert not done or parts == filled(name, sizes), "wrong bytes are accepted"
    return done


def size_of(folder: Path) -> int:
    return sum(about.st_size for key in keys(folder) for _, about in pages(key))
