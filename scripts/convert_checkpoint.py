"""Rewrites a checkpoint: FP8 (DeepSeek, GLM) to plain weights, or with --quantize to FP8, INT8 or INT4 experts.

Examples:
    python scripts/convert_checkpoint.py /data/DeepSeek-V3.2-Exp /data/DeepSeek-V3.2-Exp-bf16 --dtype bfloat16
    python scripts/convert_checkpoint.py /data/DeepSeek-V3.2-Exp /data/V3.2-int8 --quantize int8 --calibration text.txt
"""

from __future__ import annotations

from dsa_engine.cli import script

if __name__ == "__main__":
    script("convert", __doc__)
