"""SHA-256 checksums of a folder's files, which show whether the folder is unchanged."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path


def checksums_of(folder: Path) -> bytes:
    """JSON with the digest of every file in the folder, by name."""
    digests = {path.name: _digest(path) for path in sorted(folder.iterdir())}
    return (json.dumps(digests, indent=2) + "\n").encode()


def is_as_written(folder: Path, checksums: str) -> bool:
    """Whether all files match the digests in the file ``checksums``; reads all of them."""
    try:
        digests = json.loads((folder / checksums).read_text(encoding="utf-8"))
        return len(digests) > 0 and all(_digest(folder / name) == digest for name, digest in digests.items())
    except (OSError, ValueError, AttributeError, TypeError):
        return False


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
