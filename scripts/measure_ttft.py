"""Time to first token: [torchrun --nproc-per-node N] scripts/measure_ttft.py [--input-len 8192,32768]"""

from __future__ import annotations

from dsa_engine.arguments import run
from dsa_engine.measure.latency_command import measure_and_report


def main() -> None:
    measure_and_report("ttft", __doc__ or "", output_len=1)


if __name__ == "__main__":
    run(main)
