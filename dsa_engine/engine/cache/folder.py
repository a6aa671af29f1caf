"""A folder of pages, which several processes may use at once.

    <folder>/<key>/about.json                what the key stands for, to be read by people
    <folder>/<key>/<xx>/<digest>.page        one page; xx begins the digest
    <name without suffix>.<random>.part      a file that is being written, beside the later one

A page's file: magic, digest of the page, bytes of the payload, CRC-32 of the payload; then the payload, the bytes of
every layer's latent rows and index keys in order. The digest names the page's tokens and those before.

Key and digest are 32 hexadecimal digits; nothing else in the folder is counted or deleted. A page is written under
another name and then renamed, so it is there whole or not at all. A file that does not hold exactly the page that is
asked for is refused and deleted. The folder keeps to its size: where a process has written enough, it looks at all
pages of all models and deletes those that were used the longest time ago. Reading and writing raise no error: the pages
of a folder that cannot be used are computed.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import IO
from zlib import crc32

logger = logging.getLogger(__name__)

ABOUT = "about.json"  # the file that says what a key stands for
VERSION = 4  # the format's; a part of every key
_MAGIC = b"DSA page"
_HEAD = struct.Struct("<8s16sQI")
_KEY = re.compile(r"[0-9a-f]{32}")
_PAGE = re.compile(r"[0-9a-f]{32}\.page")
_UNFINISHED = re.compile(r"(?:[0-9a-f]{32}|about)\.\w+\.part")
_ABANDONED_S = 3600.0  # age after which an unfinished file belongs to a process that has ended
_LOG_S = 60.0  # between two lines of the same kind
_TRIMMED = 0.9  # fraction of its size to which the folder is trimmed
_UNSEEN = 0.01  # fraction of the size that a process writes before it looks at the folder again


class PageFolder:
    """The pages of one model in a folder, which is made if need be, for its user only; one thread reads, and one
    writes. ``max_bytes``: maximum size of all pages in the folder; None: no limit."""

    def __init__(self, folder: Path, max_bytes: int | None, key: str, about: dict[str, object]):
        self.folder, self.max_bytes = folder, max_bytes
        self._key, self._about = folder / key, about
        self._unseen = math.inf  # bytes written since the last look at the folder
        self._logged: dict[str, float] = {}
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for path in (path for one in keys(folder) for path in unfinished(one, _ABANDONED_S)):
            with suppress(OSError):
                path.unlink()

    def has(self, digest: bytes) -> bool:
        """Whether there is a file for a page; it may turn out to be damaged."""
        return os.path.isfile(page_path(self._key, digest))  # Path.is_file raises errors, such as a denied permission

    def read(self, digest: bytes, parts: Sequence[memoryview]) -> bool:
        """Reads a page; returns whether ``parts`` holds it now."""
        path = page_path(self._key, digest)
        try:
            with path.open("rb") as file:
                header = file.read(_HEAD.size)
                whole = all(file.readinto(part) == len(part) for part in parts) and not file.read(1)
        except OSError as error:
            if not isinstance(error, FileNotFoundError):
                self._log("read", "%s is not used: %s", path, error.strerror or error)
            return False
        right = whole and header == _header(digest, parts)
        if not right:
            self._log("read", "%s is not used: it is damaged, or holds something else", path)
        with suppress(OSError):
            os.utime(path) if right else path.unlink()
        return right

    def write(self, digest: bytes, parts: Sequence[memoryview]) -> bool:
        """Writes a page whole or not at all; returns whether it is there."""
        path, size = page_path(self._key, digest), file_bytes(parts)
        try:
            if not self._make_room(size):
                self._log("write", "%s: there is no room for a page of %s bytes", self.folder, f"{size:,}")
                return False
            if not path.parent.is_dir():
                self._make_folder(path.parent)
            with _whole(path) as file:
                file.writelines((_header(digest, parts), *parts))
        except OSError as error:
            self._log("write", "%s: a page is not written: %s", self.folder, error.strerror or error)
            return False
        return True

    def _make_folder(self, folder: Path) -> None:
        for made in (self.folder, self._key, folder):
            made.mkdir(mode=0o700, parents=True, exist_ok=True)
        about = self._key / ABOUT
        if not about.exists():
            with _whole(about) as file:
                file.write(json.dumps(self._about, indent=2).encode() + b"\n")

    def _make_room(self, size: int) -> bool:
        """Deletes the least recently used pages if what is written before the next look at the folder may not fit;
        returns whether a page of ``size`` bytes does. Pages that other processes write meanwhile are seen then."""
        limit = self.max_bytes
        if limit is None:
            return True
        if size > limit:
            return False
        if self._unseen + size > _UNSEEN * limit:
            files = [page for key in keys(self.folder) for page in pages(key)]
            total, unseen = sum(about.st_size for _, about in files), max(size, int(_UNSEEN * limit))
            wanted = total if total + unseen <= limit else int(_TRIMMED * limit) - unseen
            for path, about in sorted(files, key=lambda page: page[1].st_mtime):
                if total <= wanted:
                    break
                try:
                    path.unlink(missing_ok=True)
                    total -= about.st_size
                except OSError as error:
                    self._log("trim", "%s is not deleted: %s", path, error.strerror or error)
            self._unseen = 0.0 if total + size <= limit else math.inf
        self._unseen += size
        return self._unseen < math.inf

    def _log(self, kind: str, text: str, *values: object) -> None:
        now = time.monotonic()
        if now - self._logged.get(kind, -math.inf) >= _LOG_S:
            self._logged[kind] = now
            logger.warning(text, *values)


def page_path(key: Path, digest: bytes) -> Path:
    name = digest.hex()
    return key / name[:2] / f"{name}.page"


def keys(folder: Path) -> list[Path]:
    return [path for path in folder.glob("*") if _KEY.fullmatch(path.name) and path.is_dir() and not path.is_symlink()]


def pages(key: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """The files of a key's pages; the time of modification is that of the last use. Some may vanish meanwhile."""
    for path in key.glob("??/*.page"):
        if _PAGE.fullmatch(path.name) and path.name.startswith(path.parent.name):
            with suppress(OSError):
                yield path, path.lstat()


def unfinished(key: Path, older_than_s: float = 0.0) -> Iterator[Path]:
    """A key's files that a process began at least this long ago and has not finished."""
    for path in key.rglob("*.part"):
        if _UNFINISHED.fullmatch(path.name):
            with suppress(OSError):
                if time.time() - path.lstat().st_mtime >= older_than_s:
                    yield path


@contextmanager
def _whole(path: Path) -> Iterator[IO[bytes]]:
    """Yields a file of this user to write to; it then gets its name, or is deleted after an error."""
    with NamedTemporaryFile(dir=path.parent, prefix=f"{path.stem}.", suffix=".part", delete=False) as file:
        try:
            yield file
            file.flush()
            Path(file.name).replace(path)
        except BaseException:
            with suppress(OSError):
                Path(file.name).unlink()
            raise


def file_bytes(parts: Sequence[memoryview]) -> int:
    return _HEAD.size + sum(map(len, parts))


def _header(digest: bytes, parts: Sequence[memoryview]) -> bytes:
    checksum = 0
    for part in parts:
        checksum = crc32(part, checksum)
    return _HEAD.pack(_MAGIC, digest, sum(map(len, parts)), checksum)
