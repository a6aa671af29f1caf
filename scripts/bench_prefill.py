"""Long-context prefill benchmark: torchrun --nproc-per-node N scripts/bench_prefill.py --input-len 8192,32768

One rank of many on one device: python scripts/bench_prefill.py --emulate-world 64 --load-format dummy --model FOLDER
"""

from __future__ import annotations

from dsa_engine.cli import script

if __name__ == "__main__":
    script("bench prefill", __doc__)
