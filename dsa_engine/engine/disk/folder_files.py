"""The files of a folder of pages, known by their names; nothing else in the folder is counted or deleted.

    <folder>/<key>/about.json                what the key stands for, to be read by people
    <folder>/<key>/<xx>/<digest>.page        one page, see ``page_file.py``; xx begins the digest
    <name without suffix>.<random>.part      a file that is being written, beside the later one

Key and digest are 32 hexadecimal digits. Symbolic links are not followed, except for the folder itself.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

_KEY = re.compile(r"[0-9a-f]{32}")
_PAGE = re.compile(r"[0-9a-f]{32}\.page")
_UNFINISHED = re.compile(r"(?:[0-9a-f]{32}|about)\.[0-9a-f]{16}\.part")
_ABOUT_BYTES = 1 << 16  # more than any about.json has


class PageFile(NamedTuple):
    """A page's file as the folder lists it."""

    path: Path
    bytes: int
    used: float  # time of the last use, in seconds since the epoch


def page_path(key: Path, digest: bytes) -> Path:
    """The file of a page."""
    name = digest.hex()
    return key / name[:2] / f"{name}.page"


def about_path(key: Path) -> Path:
    """The file that says what a key stands for."""
    return key / "about.json"


def unfinished_path(path: Path) -> Path:
    """A name for a file while it is being written."""
    return path.with_name(f"{path.stem}.{secrets.token_hex(8)}.part")


def is_key(folder: Path) -> bool:
    """Whether a folder has the name of a key."""
    return _KEY.fullmatch(folder.name) is not None and os.path.isdir(folder)


def keys(folder: Path) -> list[Path]:
    """The subfolders of all keys in a folder."""
    return [key for key in _entries(folder) if is_key(key)]


def pages(key: Path) -> Iterator[PageFile]:
    """The files of a key's pages; files that vanish meanwhile are left out."""
    for part in _parts(key):
        for path in _entries(part):
            if _PAGE.fullmatch(path.name) and path.name.startswith(part.name):
                with suppress(OSError):
                    about = path.lstat()
                    if stat.S_ISREG(about.st_mode):
                        yield PageFile(path, about.st_size, about.st_mtime)


def unfinished(key: Path, older_than_s: float = 0.0) -> Iterator[Path]:
    """A key's files that a process has begun so long ago and not finished."""
    for folder in (key, *_parts(key)):
        for path in _entries(folder):
            if _UNFINISHED.fullmatch(path.name):
                with suppress(OSError):
                    if time.time() - path.lstat().st_mtime >= older_than_s:
                        yield path


def read_about(key: Path) -> dict[str, object]:
    """What a key stands for.

    Raises:
        OSError, ValueError: the file cannot be read, or is damaged.
    """
    path = about_path(key)
    if not path.is_file():
        raise FileNotFoundError("it is not there")
    with path.open("rb") as file:
        try:
            about = json.loads(file.read(_ABOUT_BYTES))
        except RecursionError:
            raise ValueError("it is nested too deeply") from None
    if not isinstance(about, dict):
        raise ValueError("it is no JSON object")
    return about


def delete_key(key: Path) -> list[PageFile]:
    """Deletes a key's pages, its other files and then the folders that are empty; returns the pages.

    Raises:
        OSError: a file cannot be deleted; those before it are.
    """
    deleted = list(pages(key))
    for path in (*(file.path for file in deleted), *unfinished(key), about_path(key)):
        path.unlink(missing_ok=True)
    for folder in (*_parts(key), key):
        with suppress(OSError):  # it holds files of other programs
            folder.rmdir()
    return deleted


def _parts(key: Path) -> list[Path]:
    return [part for part in _entries(key) if re.fullmatch(r"[0-9a-f]{2}", part.name)]


def _entries(folder: Path) -> list[Path]:
    """The entries of a folder but its links; none if it is no folder or cannot be read."""
    with suppress(OSError), os.scandir(folder) as entries:
        return [Path(entry.path) for entry in entries if not entry.is_symlink()]
    return []
