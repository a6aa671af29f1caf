"""``dsa-engine check``: whether a checkpoint's layers are computed right, and whether sparsity is on and works."""
