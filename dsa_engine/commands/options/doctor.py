"""The options of ``dsa-engine doctor``."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--json", metavar="PATH", help="write the findings here too; '-': to standard output")
    parser.add_argument(
        "--model", metavar="DIR", help="under torchrun: also compare the files of this model on all machines"
    )
