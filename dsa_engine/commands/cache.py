"""``dsa-engine cache``: what a folder of pages holds, and its end. It needs no torch, so that it is quick."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

from dsa_engine.config.checks import is_integer, shown
from dsa_engine.engine.disk.folder_files import PageFile, delete_key, is_key, keys, pages, read_about
from dsa_engine.system.sizes import format_bytes

_FACTS = {
    "model": "model",
    "model_type": "type",
    "dtype": "dtype",
    "cache": "cache format",
    "page_size": "page size",
    "mtp_modules": "MTP modules",
}


def add_list_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="the cache_folder of engines")


def add_clear_arguments(parser: argparse.ArgumentParser) -> None:
    add_list_arguments(parser)
    parser.add_argument("--key", help="delete the pages of this key only, as the list names it")


def run_list(args: argparse.Namespace) -> None:
    """Prints what each key of a folder stands for, and what it holds.

    Raises:
        ValueError: it is no folder of pages.
    """
    folders = _keys(args.folder)
    for key in folders:
        files = list(pages(key))
        lines, page_size = _about(key)
        print(f"{key.name}:")
        for line in lines:
            print(f"  {line}")
        print(f"  pages: {_count(files, page_size)}")
        if files:
            print(f"  last use: {_time(max(file.used for file in files))}")
    if not folders:
        print(f"{args.folder} is empty")


def run_clear(args: argparse.Namespace) -> None:
    """Deletes the files of all keys or of one, and says how many. Files that no engine has written stay.

    Raises:
        ValueError: it is no folder of pages, or has no such key.
        OSError: a file cannot be deleted.
    """
    folders = _keys(args.folder)
    if args.key is not None:
        folders = [key for key in folders if key.name == args.key]
        if not folders:
            raise ValueError(
                f"--key {shown(args.key)} is not in {args.folder}; dsa-engine cache list shows the keys that are"
            )
    for key in folders:
        try:
            deleted = delete_key(key)
        except OSError as error:
            raise OSError(f"cannot delete {error.filename or key}: {error.strerror or error}") from error
        rest = "; the folder stays, as it holds other files" if key.exists() else ""
        print(f"{key.name}: deleted {len(deleted):,} pages, {format_bytes(sum(file.bytes for file in deleted))}{rest}")
    if not folders:
        print(f"{args.folder} is empty")


def _keys(folder: Path) -> list[Path]:
    """The subfolders of a folder's keys, in order.

    Raises:
        ValueError: it is no folder of pages.
    """
    try:
        names = sorted(path.name for path in folder.iterdir())
    except OSError as error:
        raise ValueError(f"cannot read the folder {folder}: {error.strerror or error}") from error
    found_keys = sorted(keys(folder))
    if names and not found_keys:
        if is_key(folder.resolve()):
            above = folder.resolve()
            raise ValueError(f"{folder} is one key of a folder of pages; give {above.parent} and --key {above.name}")
        raise ValueError(f"{folder} is no folder of pages; give what engines have as cache_folder")
    return found_keys


def _about(key: Path) -> tuple[list[str], int | None]:
    """Lines on what a key stands for, and its page size if that is known."""
    try:
        about = read_about(key)
    except (OSError, ValueError) as error:
        return [f"about.json cannot be read: {error}"], None
    facts = [(title, about.get(name, "unknown")) for name, title in _FACTS.items()]
    size = about.get("page_size")
    known = size if isinstance(size, int) and is_integer(size) else None
    return [f"{title}: {_plain(fact)}" for title, fact in facts], known


def _plain(fact: object) -> str:
    """The text of a fact in one line, whatever the file says."""
    return fact if isinstance(fact, str) and fact.isprintable() else shown(fact)


def _count(files: Sequence[PageFile], page_size: int | None = None) -> str:
    tokens = "" if page_size is None else f", {len(files) * page_size:,} tokens"
    return f"{len(files):,}{tokens}, {format_bytes(sum(file.bytes for file in files))}"


def _time(seconds: float) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
    except (OverflowError, ValueError, OSError):
        return "unknown"
