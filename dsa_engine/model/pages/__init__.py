"""Pages whose rows do not all lie on the device: where they lie, and how they are read."""
