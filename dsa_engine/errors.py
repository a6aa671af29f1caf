"""The engine's errors: for the content of files, and for what does not fit.

Bad arguments raise ``ValueError`` or ``TypeError``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class CheckpointError(ValueError):
    """A checkpoint folder, file or tensor is missing, damaged, or not what the configuration says."""


class ContextLengthError(ValueError):
    """A prompt, or it and its output, is longer than the model's context; programs know the sentence it begins with."""

    @classmethod
    def of(cls, max_model_len: int, reason: str) -> ContextLengthError:
        return cls(f"This model's maximum context length is {max_model_len} tokens, and {reason}")


class CapacityError(ValueError):
    """A request, or the engine itself, does not fit in the memory that it was given."""


@contextmanager
def enough_memory(what: str, advice: str) -> Iterator[None]:
    """Runs a block that only allocates; a :class:`CapacityError` names ``what`` did not fit."""
    try:
        yield
    except RuntimeError as error:  # torch.OutOfMemoryError is one too
        reason = str(error).splitlines()[0]
        raise CapacityError(f"{what} could not be allocated ({reason}); {advice}") from error
