"""The checkpoint's tokenizer, through ``transformers``, which is imported when text is first used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dsa_engine.config.json_text import read_json
from dsa_engine.errors import CheckpointError
from dsa_engine.text.chat_template import render


class Tokenizer:
    """The tokenizer of a model folder.

    Args:
        folder: the model's folder.
        trust_remote_code: let the tokenizer run Python code of the folder.

    Attributes:
        hf: the tokenizer object of ``transformers``.

    Raises:
        ValueError: the tokenizer needs code of the folder, which is not trusted, or it cannot be read.
    """

    def __init__(self, folder: Path, trust_remote_code: bool = False):
        from transformers import AutoTokenizer

        self._folder = folder
        self._token_texts: dict[int, str] = {}
        try:
            # Always given: without it transformers asks on stdin, which may be a pipe with a prompt.
            self.hf: Any = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=trust_remote_code)
        except Exception as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            advice = ""
            if "trust_remote_code" in str(error) and not trust_remote_code:
                advice = "; it wants to run Python code of that folder: if you trust it, give trust_remote_code=True"
            raise ValueError(f"the tokenizer in {folder} cannot be read: {reason}{advice}") from error

    @staticmethod
    def lies_in(folder: Path) -> bool:
        """Whether the folder has a tokenizer."""
        return any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model"))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return self.hf.encode(text, add_special_tokens=add_special_tokens)

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return self.hf.decode(ids, skip_special_tokens=skip_special_tokens)

    def token_text(self, token: int) -> str:
        """The text of a single token, special tokens included."""
        if token not in self._token_texts:
            self._token_texts[token] = self.decode([token], skip_special_tokens=False)
        return self._token_texts[token]

    def word_ids(self, word: str) -> list[list[int]]:
        """The token ids of a word at the beginning of a text and, if its first token differs there, after a space."""
        start, inside = (self.hf.encode(space + word.lstrip(), add_special_tokens=False) or [] for space in ("", " "))
        differs = bool(start and inside) and inside[0] != start[0] and len(inside) == len(start)
        return [ids for ids in ([start, inside] if differs else [start]) if ids]

    def chat_text(self, messages: list[dict[str, Any]], **options: Any) -> str:
        """The text of a conversation, special tokens included; ``options`` are those of
        :func:`.chat_template.render`."""
        return render(self.hf, messages, str(self._folder), **options)

    def chat(self, messages: list[dict[str, Any]], **options: Any) -> list[int]:
        """Token ids of a conversation; see :meth:`chat_text`."""
        return self.encode(self.chat_text(messages, **options), add_special_tokens=False)


def check_tokenizer(folder: Path) -> None:
    """Checks the tokenizer's files before weights are loaded; a folder without a tokenizer passes.

    Raises:
        CheckpointError: a file is damaged; the text names it.
    """
    path = folder / "tokenizer_config.json"
    if path.is_file():
        try:
            read_json(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise CheckpointError(f"{path} is not valid JSON ({error}); get the file again") from error
    path = folder / "tokenizer.json"
    if path.is_file():
        from tokenizers import Tokenizer as Read  # a part of transformers, and much quicker to import

        try:
            Read.from_file(str(path))
        except Exception as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            with path.open("rb") as file:
                pointer = file.read(40).startswith(b"version https://git-lfs")
            advice = "it is a git-lfs pointer: run `git lfs pull` in its folder" if pointer else "get the file again"
            raise CheckpointError(f"{path} is no tokenizer ({reason}); {advice}") from error
