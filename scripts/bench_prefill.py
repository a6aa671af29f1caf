"""Long-context prefill benchmark: torchrun --nproc-per-node N scripts/bench_prefill.py --seq-len 8192,32768

One rank of many on one device: python scripts/bench_prefill.py --emulate-world 64 --load-format dummy --model FOLDER
"""

from __future__ import annotations

from dsa_engine.arguments import argument_parser, run
from dsa_engine.commands.bench.prefill_command import add_arguments, run_prefill


def main() -> None:
    parser = argument_parser(__doc__)
    add_arguments(parser)
    run_prefill(parser.parse_args())


if __name__ == "__main__":
    run(main)
