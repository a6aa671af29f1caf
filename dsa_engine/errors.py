"""The two errors a user of the engine can meet, besides Python's own.

Bad arguments raise ``ValueError``/``TypeError``; these are for what lies in files and for what does not fit.
"""


class CheckpointError(ValueError):
    """A checkpoint folder, file or tensor is missing, damaged, or not what the configuration says."""


class CapacityError(ValueError):
    """A request, or the engine itself, does not fit in the memory that it was given."""
