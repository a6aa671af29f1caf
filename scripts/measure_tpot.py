"""Time per output token: [torchrun --nproc-per-node N] scripts/measure_tpot.py [--input-len 8192,32768]"""

from __future__ import annotations

from dsa_engine.arguments import run
from dsa_engine.measure.latency_command import measure_and_report


def main() -> None:
    measure_and_report("tpot", __doc__ or "", output_len=64)


if __name__ == "__main__":
    run(main)
