"""``dsa-engine doctor``: the checks of a machine, one finding each, and how they are printed."""
