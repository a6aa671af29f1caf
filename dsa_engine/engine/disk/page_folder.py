"""A folder of pages, which several processes may use at once; ``folder_files.py`` has the names of its files.

A page is written under another name and then renamed, so it is there whole or not at all. Nothing in the folder is
trusted: a page is checked when it is read. The folder keeps to its size: where a process has written enough, it looks
at all pages of all models and deletes those that were used the longest time ago. Nothing here raises an error: the
pages of a folder that cannot be used are computed.
"""

from __future__ import annotations

import json
import logging
import math
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from dsa_engine.engine.disk.folder_files import about_path, keys, page_path, pages, unfinished, unfinished_path
from dsa_engine.engine.disk.page_file import RefusedFile, file_bytes, read_page, write_page

logger = logging.getLogger(__name__)

_ABANDONED_S = 3600.0  # age after which an unfinished file belongs to a process that has ended
_LOG_S = 60.0  # between two lines of the same kind
_TRIMMED = 0.9  # fraction of its size to which the folder is trimmed
_UNSEEN = 0.01  # fraction of the size that a process writes before it looks at the folder again


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
        self._key, self._about = folder / key, about
        self._unseen: float | None = None  # bytes written since the last look at the folder; None: look first
        self._trimming = threading.Lock()
        self._logged: dict[str, float] = {}
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def has(self, digest: bytes) -> bool:
        """Whether there is a file for a page; it may turn out to be damaged."""
        return os.path.isfile(page_path(self._key, digest))  # Path.is_file raises errors, such as a denied permission

    def read(self, digest: bytes, tokens: Sequence[int], parts: Sequence[memoryview]) -> bool:
        """Reads a page; returns whether ``parts`` holds it now. A file that is refused is deleted."""
        path = page_path(self._key, digest)
        try:
            read_page(path, digest, tokens, parts)
        except FileNotFoundError:
            return False
        except RefusedFile as error:
            self._log("read", "%s is not used: %s", path, error)
            with suppress(OSError):
                path.unlink()
            return False
        except OSError as error:
            self._log("read", "%s is not used: %s", path, error.strerror or error)
            return False
        with suppress(OSError):
            os.utime(path)
        return True

    def write(self, digest: bytes, tokens: Sequence[int], parts: Sequence[memoryview]) -> bool:
        """Writes a page whole or not at all; returns whether it is there."""
        path, size = page_path(self._key, digest), file_bytes(tokens, parts)
        try:
            if not self._make_room(size):
                self._log("write", "%s: there is no room for a page of %s bytes", self.folder, f"{size:,}")
                return False
            self._make_folder(path.parent)
            with _whole(path) as temporary:
                write_page(temporary, digest, tokens, parts)
        except (OSError, EOFError) as error:
            self._log("write", "%s: a page is not written: %s", self.folder, getattr(error, "strerror", None) or error)
            return False
        return True

    def _make_folder(self, folder: Path) -> None:
        if folder.is_dir():
            return
        for made in (self.folder, self._key, folder):
            made.mkdir(mode=0o700, parents=True, exist_ok=True)
        about = about_path(self._key)
        if not about.exists():
            with _whole(about) as temporary:
                temporary.touch(0o600)
                temporary.write_text(json.dumps(self._about, indent=2) + "\n", encoding="utf-8")

    def _make_room(self, size: int) -> bool:
        """Deletes unfinished files and the least recently used pages if a page of ``size`` bytes may not fit; returns
        whether it does.

        Pages that other processes write meanwhile are seen at the next look only.
        """
        limit = math.inf if self.max_bytes is None else self.max_bytes
        if size > limit:
            return False
        with self._trimming:
            fits = True
            if self._unseen is None or self._unseen + size > _UNSEEN * limit:
                folders = keys(self.folder)
                for path in (path for key in folders for path in unfinished(key, _ABANDONED_S)):
                    with suppress(OSError):
                        path.unlink()
                fits = self.max_bytes is None or self._trim(folders, size, self.max_bytes)
                self._unseen = 0.0 if fits else None
            if self._unseen is not None:
                self._unseen += size
            return fits

    def _trim(self, folders: Sequence[Path], size: int, limit: int) -> bool:
        """Deletes pages, if what is written before the next look may not fit; returns whether ``size`` bytes do."""
        files = sorted((file for key in folders for file in pages(key)), key=lambda file: file.used)
        total, unseen = sum(file.bytes for file in files), max(size, int(_UNSEEN * limit))
        if total + unseen > limit:
            for file in files:
                if total + unseen <= _TRIMMED * limit:
                    break
                try:
                    file.path.unlink(missing_ok=True)
                    total -= file.bytes
                except OSError as error:
                    self._log("trim", "%s is not deleted: %s", file.path, error.strerror or error)
        return total + size <= limit

    def _log(self, kind: str, text: str, *values: object) -> None:
        now = time.monotonic()
        if now - self._logged.get(kind, -math.inf) >= _LOG_S:
            self._logged[kind] = now
            logger.warning(text, *values)


@contextmanager
def _whole(path: Path) -> Iterator[Path]:
    """Yields a name to write to; the file then gets its own name, or is deleted after an error."""
    temporary = unfinished_path(path)
    try:
        yield temporary
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
