"""``dsa-engine bench``: prefill, time to first token, time per output token, and serving, each measured and printed."""
