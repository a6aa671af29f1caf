"""Time per output token, through the generate API: [torchrun --nproc-per-node N] scripts/measure_tpot.py"""

from __future__ import annotations

from dsa_engine.arguments import run
from dsa_engine.latency import measure_and_report


def main() -> None:
    measure_and_report("tpot", __doc__ or "", output_len=64)


if __name__ == "__main__":
    run(main)
