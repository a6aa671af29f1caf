"""Temporary folders in which checkpoints are written, beside their target, and the removal of abandoned ones."""

from __future__ import annotations

import glob
import logging
import os
import re
import shutil
import socket
import uuid
from pathlib import Path

logger = logging.getLogger(__name__)


def temporary_name(target: Path) -> Path:
    """A name beside ``target``, so that the final rename stays on one file system; it names process and host."""
    return target.with_name(f"{target.name}.incomplete-{os.getpid()}-{uuid.uuid4().hex[:8]}@{socket.gethostname()}")


def remove_leftovers(target: Path) -> None:
    """Removes the temporary folders for ``target`` of this machine's processes that no longer run."""
    for path in target.parent.glob(f"{glob.escape(target.name)}.incomplete-*@{glob.escape(socket.gethostname())}"):
        match = re.match(r"\.incomplete-(\d+)-[0-9a-f]{8}@", path.name[len(target.name) :])
        if match and not _runs(int(match[1])):
            logger.info("removing %s, left by a killed process", path)
            shutil.rmtree(path, ignore_errors=True)


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:  # a process of another user
        pass
    return True
