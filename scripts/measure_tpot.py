"""Time per output token: [torchrun --nproc-per-node N] scripts/measure_tpot.py [--input-len 8192,32768]"""

from __future__ import annotations

from dsa_engine.arguments import argument_parser, run
from dsa_engine.commands.bench.latency_command import add_arguments, run_latency


def main() -> None:
    parser = argument_parser(__doc__)
    add_arguments(parser, "tpot")
    run_latency(parser.parse_args(), "tpot")


if __name__ == "__main__":
    run(main)
