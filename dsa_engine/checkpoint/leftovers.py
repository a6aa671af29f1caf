"""The folder under which a checkpoint is built, beside its target, and what killed processes have left of such."""

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
    """A name beside ``target``, so that the rename at the end stays on one file system; it says whose it is."""
    return target.with_name(f"{target.name}.incomplete-{os.getpid()}-{uuid.uuid4().hex[:8]}@{socket.gethostname()}")


def remove_leftovers(target: Path) -> None:
    """Removes what processes of this machine that no longer run have left of their attempts to write ``target``."""
    for path in target.parent.glob(f"{glob.escape(target.name)}.incomplete-*@{glob.escape(socket.gethostname())}"):
        match = re.match(r"\.incomplete-(\d+)-[0-9a-f]{8}@", path.name[len(target.name) :])
        if match and not _runs(int(match[1])):
            logger.info("removing %s, which a killed process has left", path)
            shutil.rmtree(path, ignore_errors=True)


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:  # it is somebody else's
        pass
    return True
