"""The options of ``dsa-engine cache list`` and ``cache clear``."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_list_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="the cache_folder of engines")


def add_clear_arguments(parser: argparse.ArgumentParser) -> None:
    add_list_arguments(parser)
    parser.add_argument("--key", help="delete the pages of this key only, as the list names it")
