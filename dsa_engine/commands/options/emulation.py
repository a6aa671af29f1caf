"""The options for measuring one rank of many on one device."""

from __future__ import annotations

import argparse


def add_emulation_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options; ``dsa_engine.measure.emulation.arguments.measured_llm`` reads them."""
    group = parser.add_argument_group("one rank of many (in one process, without torchrun)")
    group.add_argument(
        "--emulate-world",
        type=int,
        metavar="N",
        help="run the work of one rank of N: computation is measured, communication modelled; tokens mean nothing",
    )
    group.add_argument("--emulate-rank", type=int, metavar="R", help="which rank, from 0 (default: 0)")
    group.add_argument("--links", metavar="PATH", help="JSON with the links' figures; default: NVLink and InfiniBand")
