"""``dsa-engine doctor``: the checks, one finding each, and how they are printed."""
