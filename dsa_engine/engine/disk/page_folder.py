"""A folder of pages, which several processes may use at once.

    <folder>/<model key>/about.json          what the key stands for, to be read by people
    <folder>/<model key>/<xx>/<digest>.page  one page, see ``page_file.py``

A page is written under another name and then renamed, so it is there whole or not at all. Nothing in the folder is
trusted: a page is checked when it is read. The folder keeps to its size: where a process has written enough, it looks
at all pages of all models and deletes those that were used the longest time ago.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import NamedTuple

from dsa_engine.engine.disk.page_file import RefusedFile, read_page, write_page

logger = logging.getLogger(__name__)

ABOUT = "about.json"
SUFFIX = ".page"
_TEMPORARY = ".part"
_TEMPORARY_S = 3600.0  # age after which an unfinished file belongs to a process that has ended
_LOG_S = 60.0  # between two lines of the same kind
_TRIMMED = 0.9  # fraction of its size to which the folder is trimmed
_UNSEEN = 0.01  # fraction of the size that a process writes before it looks at the folder again


class PageFile(NamedTuple):
    """A page's file as the folder lists it."""

    path: Path
    bytes: int
    used: float  # time of the last use, in seconds since the epoch


class PageFolder:
    """The pages of one model in a folder.

    Args:
        folder: is made if need be, for its user only.
        max_bytes: maximum size of all pages in the folder; None: no limit.
        key: name of the model's subfolder.
        about: what the key stands for.

    Raises:
        OSError: the folder is not there and cannot be made.
    """

    def __init__(self, folder: Path, max_bytes: int | None, key: str, about: dict[str, object]):
        self.folder, self.max_bytes = folder, max_bytes
        self._own, self._about = folder / key, about
        self._numbers = count()
        self._unseen: float | None = None  # bytes written since the last look at the folder; None: before the first
        self._trimming = threading.Lock()
        self._logged: dict[str, float] = {}
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def has(self, digest: bytes) -> bool:
        """Whether there is a file for a page; it may turn out to be damaged."""
        return self._path(digest).exists()

    def read(self, digest: bytes, tokens: Sequence[int], parts: Sequence[memoryview]) -> bool:
        """Reads a page; returns whether ``parts`` holds it now. A file that is damaged is deleted."""
        path = self._path(digest)
        try:
            read_page(path, digest, tokens, parts)
        except FileNotFoundError:
            return False
        except RefusedFile as error:
            self._log("read", "%s is not used: %s", path, error)
            if error.damaged:
                with suppress(OSError):
                    path.unlink()
            return False
        except OSError as error:
            self._log("read", "%s is not used: %s", path, error)
            return False
        with suppress(OSError):
            os.utime(path)
        return True

    def write(self, digest: bytes, tokens: Sequence[int], parts: Sequence[memoryview]) -> bool:
        """Writes a page whole or not at all; returns whether it is there."""
        path = self._path(digest)
        temporary = path.with_name(f"{path.stem}.{os.getpid()}.{next(self._numbers)}{_TEMPORARY}")
        size = sum(map(len, parts))
        try:
            if self.max_bytes is not None and not self._make_room(size):
                self._log("write", "%s: a page of %s bytes is larger than the folder may be", self.folder, size)
                return False
            self._make_folder(path.parent)
            try:
                written = write_page(temporary, digest, tokens, parts)
                temporary.replace(path)
            except BaseException:
                with suppress(OSError):
                    temporary.unlink()
                raise
        except (OSError, EOFError) as error:
            self._log("write", "%s: a page is not written: %s", self.folder, error)
            return False
        self._unseen = (self._unseen or 0.0) + written
        return True

    def _path(self, digest: bytes) -> Path:
        name = digest.hex()
        return self._own / name[:2] / f"{name}{SUFFIX}"

    def _make_folder(self, folder: Path) -> None:
        if folder.is_dir():
            return
        self._own.mkdir(mode=0o700, parents=True, exist_ok=True)
        about = self._own / ABOUT
        if not about.exists():
            temporary = about.with_name(f"{ABOUT}.{os.getpid()}.{next(self._numbers)}{_TEMPORARY}")
            temporary.write_text(json.dumps(self._about, indent=2) + "\n", encoding="utf-8")
            temporary.replace(about)
        folder.mkdir(mode=0o700, exist_ok=True)

    def _make_room(self, size: int) -> bool:
        """Deletes the least recently used pages if the folder may have no room for another one; returns whether it can
        have."""
        assert self.max_bytes is not None
        with self._trimming:
            if self._unseen is None or self._unseen + size > _UNSEEN * self.max_bytes:
                files = sorted(pages(self.folder), key=lambda file: file.used)
                total = sum(file.bytes for file in files)
                limit = self.max_bytes if total + size <= self.max_bytes else _TRIMMED * self.max_bytes
                for file in files:
                    if total + size <= limit:
                        break
                    with suppress(OSError):
                        file.path.unlink()
                    total -= file.bytes
                delete_unfinished(self.folder)
                self._unseen = 0.0
        return size <= self.max_bytes

    def _log(self, kind: str, text: str, *values: object) -> None:
        now = time.monotonic()
        if now - self._logged.get(kind, -_LOG_S) >= _LOG_S:
            self._logged[kind] = now
            logger.warning(text, *values)


def pages(folder: Path) -> Iterator[PageFile]:
    """The files of all pages of all models in a folder; files that vanish meanwhile are left out."""
    for path in _files(folder, SUFFIX):
        with suppress(OSError):
            about = path.stat()
            yield PageFile(path, about.st_size, about.st_mtime)


def delete_unfinished(folder: Path, older_than_s: float = _TEMPORARY_S) -> int:
    """Deletes files that a process has begun and not finished; returns their number."""
    deleted = 0
    for path in _files(folder, _TEMPORARY):
        with suppress(OSError):
            if time.time() - path.stat().st_mtime >= older_than_s:
                path.unlink()
                deleted += 1
    return deleted


def _files(folder: Path, suffix: str) -> Iterator[Path]:
    for key in _entries(folder):
        yield from (path for path in _entries(key) if path.suffix == suffix)
        for part in _entries(key):
            yield from (path for path in _entries(part) if path.suffix == suffix)


def _entries(folder: Path) -> list[Path]:
    """The entries of a folder; none if it is no folder or cannot be read. Links are not followed, but for the first."""
    with suppress(OSError), os.scandir(folder) as entries:
        return [Path(entry.path) for entry in entries if not entry.is_symlink()]
    return []
