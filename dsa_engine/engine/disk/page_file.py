"""The file of a page: a header that says what it holds, and the page's bytes of all layers.

    magic, version, number of tokens, bytes of the payload, digest of the page, checksum of the payload
    token ids, int64 each
    checksum of all of this
    payload: the bytes of every layer's latent rows and index keys, in order

A file that does not hold exactly what is asked for is refused, whatever the reason.
"""

from __future__ import annotations

import os
import struct
from array import array
from collections.abc import Callable, Sequence
from hashlib import blake2b
from pathlib import Path
from zlib import crc32

MAGIC = b"DSA page"
VERSION = 1
_HEAD = struct.Struct("<8sIIQ16s16s")
_SUM = 16  # bytes of a checksum
_BUFFERS = 512  # buffers of one call; Linux allows 1,024


class RefusedFile(Exception):
    """A file is not the page that is asked for."""


def file_bytes(tokens: Sequence[int], parts: Sequence[memoryview]) -> int:
    """Bytes of the file of a page."""
    return _header_bytes(tokens) + sum(map(len, parts))


def write_page(path: Path, name: bytes, tokens: Sequence[int], parts: Sequence[memoryview]) -> None:
    """Writes a new file, readable by its user only.

    Args:
        name: the page's digest, 16 bytes.
        tokens: the ids that its rows depend on, beside those of the pages before.
        parts: its bytes.

    Raises:
        OSError: it could not be written; a part of it may be there.
    """
    size = sum(map(len, parts))
    header = memoryview(_header(name, tokens, size, _checksum(parts)))
    number = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        _transfer([header, *parts], lambda buffers, _: os.writev(number, buffers), 0)
    finally:
        os.close(number)


def read_page(path: Path, name: bytes, tokens: Sequence[int], parts: Sequence[memoryview]) -> None:
    """Fills ``parts`` with a page; arguments as for :func:`write_page`.

    Raises:
        OSError: there is no such file, or it could not be read.
        RefusedFile: it holds something else, or is damaged.
    """
    size = sum(map(len, parts))
    header = bytearray(_header_bytes(tokens))
    number = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # without a wait, if it is a pipe

    def read(buffers: Sequence[memoryview], position: int) -> int:
        return os.preadv(number, buffers, position)

    try:
        _transfer([memoryview(header)], read, 0)
        magic, version, *_, checksum = _HEAD.unpack_from(header)
        if magic != MAGIC:
            raise RefusedFile("it is no page of this program")
        if version != VERSION:
            raise RefusedFile(f"it has version {version} of the format, not {VERSION}")
        if bytes(header) != _header(name, tokens, size, checksum):
            raise RefusedFile("its header is damaged or of another page")
        if os.fstat(number).st_size != len(header) + size:
            raise RefusedFile("its size is not that of its header")
        _transfer(parts, read, len(header))
        if _checksum(parts) != checksum:
            raise RefusedFile("its bytes are damaged")
    except EOFError:
        raise RefusedFile("it is too short") from None
    finally:
        os.close(number)


def _header_bytes(tokens: Sequence[int]) -> int:
    return _HEAD.size + 8 * len(tokens) + _SUM


def _header(name: bytes, tokens: Sequence[int], size: int, checksum: bytes) -> bytes:
    header = _HEAD.pack(MAGIC, VERSION, len(tokens), size, name, checksum) + array("q", tokens).tobytes()
    return header + blake2b(header, digest_size=_SUM).digest()


def _checksum(parts: Sequence[memoryview]) -> bytes:
    """Digests the CRC-32 of each part, which finds flipped, moved and swapped bytes anywhere and is several times as
    fast as a digest of all bytes. Other damage of a part passes once in 2^32 cases."""
    whole = blake2b(digest_size=_SUM)
    for part in parts:
        whole.update(crc32(part).to_bytes(4, "little"))
    return whole.digest()


def _transfer(
    buffers: Sequence[memoryview], transfer: Callable[[Sequence[memoryview], int], int], position: int
) -> None:
    """Transfers all bytes of ``buffers``; a call may transfer a part of them.

    Raises:
        EOFError: a call transfers none.
    """
    waiting = [buffer for buffer in buffers if len(buffer)]
    first = 0
    while first < len(waiting):
        done = transfer(waiting[first : first + _BUFFERS], position)
        if done == 0:
            raise EOFError("no bytes are transferred")
        position += done
        while done and done >= len(waiting[first]):
            done -= len(waiting[first])
            first += 1
        if done:
            waiting[first] = waiting[first][done:]
