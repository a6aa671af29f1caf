"""The engine's two errors: for the content of files, and for what does not fit.

Bad arguments raise ``ValueError`` or ``TypeError``.
"""


class CheckpointError(ValueError):
    """A checkpoint folder, file or tensor is missing, damaged, or not what the configuration says."""


class CapacityError(ValueError):
    """A request, or the engine itself, does not fit in the memory that it was given."""
