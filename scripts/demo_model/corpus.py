"""Text of the training: Python's own standard library and language reference, under the PSF licence.

Nothing is downloaded: the files are those of the interpreter that runs the training. Whole files are held out for
evaluation, chosen by a hash of their names, so that no line of them is ever trained on.
"""

from __future__ import annotations

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path

HELD_OUT_SHARE = 16  # one file in 16 is held out


@dataclass(frozen=True)
class Corpus:
    """Texts by name, in the order of names: whole files for training and whole files held out."""

    train: dict[str, str]
    held_out: dict[str, str]

    def digest(self) -> str:
        """SHA-256 of all texts, for the log."""
        digest = hashlib.sha256()
        for name, text in sorted((self.train | self.held_out).items()):
            digest.update(f"{name}\0{text}\0".encode())
        return digest.hexdigest()


def standard_library() -> Corpus:
    """Sources of the standard library's top folder and the topics of the language reference (``pydoc_data``)."""
    from pydoc_data.topics import topics

    texts = {f"topics/{name}": text for name, text in topics.items()}
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        texts[path.name] = path.read_text(encoding="utf-8", errors="replace")
    train: dict[str, str] = {}
    held_out: dict[str, str] = {}
    for name, text in sorted(texts.items()):
        number = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big")
        (held_out if number % HELD_OUT_SHARE == 0 else train)[name] = text.replace("\t", "    ")
    return Corpus(train, held_out)
