"""Writes a checkpoint with random weights in the released layout, for any configuration.

Examples:
    python scripts/make_checkpoint.py --config demo --output /tmp/demo
    python scripts/make_checkpoint.py --config deepseek_v32 --overrides '{"num_hidden_layers": 4}' --output /data/v32-4
"""

from __future__ import annotations

from dsa_engine.cli import script

if __name__ == "__main__":
    script("make-checkpoint", __doc__)
