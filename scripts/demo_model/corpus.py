"""Text of the training: Python's own standard library and language reference, under the PSF licence.

Nothing is downloaded: the files are those of the interpreter that runs the training. Whole files are held out for
evaluation, chosen by a hash of their names, so that no line of them is ever trained on.
"""

from __future__ import annotations

import hashlib
import sysconfig
from pathlib import Path

from tokenizers import Tokenizer

from demo_model import recipe
from demo_model.data import Documents, Library, Writer
from dsa_engine.demo import trained_folder

HELD_OUT = 16  # one file in 16 is held out


def standard_library() -> tuple[dict[str, str], dict[str, str]]:
    """Texts by name, for training and held out: sources of the standard library's top folder and the topics of the
    language reference (``pydoc_data``)."""
    from pydoc_data.topics import topics

    texts = {f"topics/{name}": text for name, text in topics.items()}
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        texts[path.name] = path.read_text(encoding="utf-8", errors="replace")
    train: dict[str, str] = {}
    held_out: dict[str, str] = {}
    for name, text in sorted(texts.items()):
        number = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big")
        (held_out if number % HELD_OUT == 0 else train)[name] = text.replace("\t", "    ")
    return train, held_out


def documents_of(texts: dict[str, str], seed: int = recipe.SEED) -> Documents:
    """Documents whose text is ``texts``, in the shipped model's tokens."""
    tokenizer = Tokenizer.from_file(str(trained_folder() / "tokenizer.json"))
    writer = Writer(tokenizer.get_vocab())

    def encode(lines: list[str]) -> list[list[int]]:
        return [encoding.ids for encoding in tokenizer.encode_batch(lines, add_special_tokens=False)]

    return Documents(Library(texts, encode, writer.newline), writer, seed)
