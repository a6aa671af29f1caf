"""The folder of a resumable run: finished shards stay in it until the target is complete."""

from __future__ import annotations

import fcntl
import hashlib
import os
from pathlib import Path

from dsa_engine.errors import CheckpointError

_UNFINISHED = ".part"  # suffix of a shard while it is written
_LOCK = ".lock"


class ResumableFolder:
    """A folder beside the target whose name is a digest of what is written, so that a second run finds it.

    Args:
        target: the folder that it will become.
        what: text that identifies what is written, with every option and shard.
    """

    def __init__(self, target: Path, what: str):
        digest = hashlib.blake2b(what.encode(), digest_size=6).hexdigest()
        self.path = target.with_name(f"{target.name}.resumable-{digest}")
        self._lock: int | None = None

    def enter(self) -> None:
        """Creates the folder if it does not exist, and locks it for this process.

        Raises:
            CheckpointError: another process has locked it.
        """
        self.path.mkdir(exist_ok=True)
        self._lock = os.open(self.path / _LOCK, os.O_CREAT | os.O_RDWR)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self.leave()
            raise CheckpointError(f"another process is writing {self.path}; wait for it, or end it") from error

    def leave(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def finished(self, shard: str) -> bool:
        return (self.path / shard).is_file()

    def unfinished(self, shard: str) -> Path:
        """The path of a shard while it is written."""
        return self.path / (shard + _UNFINISHED)

    def finish(self, shard: str) -> None:
        os.rename(self.unfinished(shard), self.path / shard)

    def tidy(self) -> None:
        """Removes everything that does not belong in the target."""
        for path in (self.path / _LOCK, *self.path.glob(f"*{_UNFINISHED}")):
            path.unlink(missing_ok=True)
