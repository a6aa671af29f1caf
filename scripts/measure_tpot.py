"""Time per output token: [torchrun --nproc-per-node N] scripts/measure_tpot.py [--input-len 8192,32768]"""

from __future__ import annotations

from dsa_engine.cli import script

if __name__ == "__main__":
    script("bench tpot", __doc__)
