"""SHA-256 of every file of a folder, kept in it: whether it is still as it was written."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path


def checksums_of(folder: Path) -> bytes:
    """The JSON to keep: the digest of every file that is there, by name."""
    digests = {path.name: _digest(path) for path in sorted(folder.iterdir())}
    return (json.dumps(digests, indent=2) + "\n").encode()


def is_as_written(folder: Path, checksums: str) -> bool:
    """Whether all files are there as the file ``checksums`` has them; reads all of them."""
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
