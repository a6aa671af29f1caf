"""The file of a page: a header that says what it holds, and the page's bytes of all layers.

    magic, digest of the page, bytes of the payload, CRC-32 of the payload
    payload: the bytes of every layer's latent rows and index keys, in order

The digest names the page's tokens and those before. A file that does not hold exactly what is asked for is refused.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from pathlib import Path
from zlib import crc32

VERSION = 3  # the format's; a part of every key
_MAGIC = b"DSA page"
_HEAD = struct.Struct("<8s16sQI")


class RefusedFile(Exception):
    """A file is not the page that is asked for."""


def file_bytes(parts: Sequence[memoryview]) -> int:
    """Bytes of the file of a page."""
    return _HEAD.size + sum(map(len, parts))


def write_page(path: Path, digest: bytes, parts: Sequence[memoryview]) -> None:
    """Writes a new file, readable by its user only.

    Raises:
        OSError: it could not be written; a part of it may be there.
    """
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(_header(digest, parts))
        for part in parts:
            file.write(part)


def read_page(path: Path, digest: bytes, parts: Sequence[memoryview]) -> None:
    """Fills ``parts`` with the page of a digest.

    Raises:
        OSError: there is no such file, or it could not be read.
        RefusedFile: it holds something else, or is damaged.
    """
    with path.open("rb") as file:
        header = file.read(_HEAD.size)
        whole = all(file.readinto(part) == len(part) for part in parts) and not file.read(1)
    if not whole or header != _header(digest, parts):
        raise RefusedFile("it is damaged, or holds something else")


def _header(digest: bytes, parts: Sequence[memoryview]) -> bytes:
    checksum = 0
    for part in parts:
        checksum = crc32(part, checksum)
    return _HEAD.pack(_MAGIC, digest, sum(map(len, parts)), checksum)
