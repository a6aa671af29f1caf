"""Time to first token: [torchrun --nproc-per-node N] scripts/measure_ttft.py [--input-len 8192,32768]"""

from __future__ import annotations

from dsa_engine.cli import script

if __name__ == "__main__":
    script("bench ttft", __doc__)
