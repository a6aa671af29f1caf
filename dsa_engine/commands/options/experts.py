"""The options of ``dsa-engine experts``."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, metavar="FILE", help="loads, as record_expert_loads writes them")
    parser.add_argument(
        "--ranks", type=int, metavar="N", help="also the largest load of a rank, with experts in order and as planned"
    )
    parser.add_argument(
        "--redundant-experts", type=int, default=0, metavar="M", help="replicas in each layer, on all ranks together"
    )
    parser.add_argument("--plot", metavar="PATH", help="draw the loads here (.png)")
    parser.add_argument("--json", metavar="PATH", help="write the figures here too; '-': to standard output")
