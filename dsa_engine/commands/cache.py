"""``dsa-engine cache``: what a folder of pages holds, and its end. It needs no torch, so that it is quick."""

from __future__ import annotations

import argparse
import json
import time
from contextlib import suppress
from pathlib import Path

from dsa_engine.config.checks import shown
from dsa_engine.engine.cache.folder import ABOUT, keys, pages, unfinished
from dsa_engine.system.sizes import format_bytes

_FACTS = {
    "model": "model",
    "model_type": "type",
    "dtype": "dtype",
    "cache_dtype": "cache format",
    "page_size": "page size",
    "mtp_modules": "MTP modules",
}


def add_list_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="the cache_folder of engines")


def add_clear_arguments(parser: argparse.ArgumentParser) -> None:
    add_list_arguments(parser)
    parser.add_argument("--key", help="delete the pages of this key only, as the list names it")


def run_list(args: argparse.Namespace) -> None:
    """Prints what each key of a folder stands for, and what it holds."""
    for key in _keys(args.folder):
        about, files = dict[str, object](), [stat for _, stat in pages(key)]
        with suppress(OSError, ValueError, TypeError):  # lost or damaged: its facts are unknown
            about = dict(json.loads((key / ABOUT).read_bytes()))
        print(f"{key.name}:")
        for name, title in _FACTS.items():
            print(f"  {title}: {about.get(name, 'unknown')}")
        size = about.get("page_size")
        tokens = f", {len(files) * size:,} tokens" if isinstance(size, int) else ""
        print(f"  pages: {len(files):,}{tokens}, {format_bytes(sum(file.st_size for file in files))}")
        if files:
            used = time.localtime(max(file.st_mtime for file in files))
            print(f"  last use: {time.strftime('%Y-%m-%d %H:%M:%S', used)}")


def run_clear(args: argparse.Namespace) -> None:
    """Deletes the files of all keys or of one, and says how many. Files that no engine has written stay."""
    folders = _keys(args.folder)
    if args.key is not None:
        folders = [key for key in folders if key.name == args.key]
        if not folders:
            raise ValueError(
                f"--key {shown(args.key)} is not in {args.folder}; dsa-engine cache list shows the keys that are"
            )
    for key in folders:
        deleted = list(pages(key))
        for path in (*(path for path, _ in deleted), *unfinished(key), key / ABOUT):
            path.unlink(missing_ok=True)
        for folder in (*key.glob("??"), key):
            with suppress(OSError):  # it holds files of other programs
                folder.rmdir()
        rest = "; the folder stays, as it holds other files" if key.exists() else ""
        size = format_bytes(sum(stat.st_size for _, stat in deleted))
        print(f"{key.name}: deleted {len(deleted):,} pages, {size}{rest}")


def _keys(folder: Path) -> list[Path]:
    """The subfolders of a folder's keys, in order; says so if the folder is empty."""
    try:
        names = list(folder.iterdir())
    except OSError as error:
        raise ValueError(f"cannot read the folder {folder}: {error.strerror or error}") from error
    present = sorted(keys(folder))
    if names and not present:
        raise ValueError(f"{folder} is no folder of pages; give what engines have as cache_folder")
    if not names:
        print(f"{folder} is empty")
    return present
