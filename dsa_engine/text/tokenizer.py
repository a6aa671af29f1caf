"""The checkpoint's tokenizer, through ``transformers``, which is imported when text is first used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dsa_engine.config.checks import check_text
from dsa_engine.errors import CheckpointError


class Tokenizer:
    """The tokenizer of a model folder.

    What fails in it is a ``ValueError`` that names the folder, even a panic of its Rust code, which is no
    ``Exception``. So it fails the request whose text is at fault, and no other.

    Args:
        folder: the model's folder.
        trust_remote_code: let the tokenizer run Python code of the folder.

    Attributes:
        folder: the model's folder.
        hf: the tokenizer object of ``transformers``.

    Raises:
        ValueError: there is none, or it needs code of the folder, which is not trusted, or it cannot be read.
    """

    def __init__(self, folder: Path, trust_remote_code: bool = False):
        if not self.lies_in(folder):
            raise ValueError(
                f"{folder} has no tokenizer; give prompts as lists of token ids, and no stop strings or bad words"
            )
        from transformers import AutoTokenizer, PreTrainedTokenizerFast

        self.folder = folder
        self._token_texts: dict[int, str] = {}
        try:
            # Always given: without it transformers asks on stdin, which may be a pipe with a prompt.
            self.hf: Any = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=trust_remote_code)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            advice = ""
            if "trust_remote_code" in str(error) and not trust_remote_code:
                advice = "; it wants to run Python code of that folder: if you trust it, give trust_remote_code=True"
            raise ValueError(f"the tokenizer in {folder} cannot be read: {reason}{advice}") from error
        # What the library adds to its Rust code takes longer than that; a tokenizer that changes texts needs it.
        kind, library = type(self.hf), PreTrainedTokenizerFast
        plain = isinstance(self.hf, library) and kind.decode is library.decode and kind._decode is library._decode
        self._decoder = self.hf.backend_tokenizer if plain and not self.hf.clean_up_tokenization_spaces else self.hf

    @staticmethod
    def lies_in(folder: Path) -> bool:
        """Whether the folder has a tokenizer."""
        return any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model"))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. If the text begins with the token that begins every text (BOS), it gets no second one.

        Raises:
            ValueError: the text is not whole characters, or the tokenizer fails.
        """
        check_text("the text", text)
        try:
            ids: list[int] = self.hf.encode(text, add_special_tokens=add_special_tokens)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            raise self._failure("encode the text", error) from error
        begin = self.hf.bos_token_id
        if add_special_tokens and ids[:2] == [begin, begin] and text.startswith(self.hf.bos_token):
            del ids[0]
        return ids

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        """The text of token ids; raises ``ValueError`` if the tokenizer fails."""
        try:
            return str(self._decoder.decode(ids, skip_special_tokens=skip_special_tokens))
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            raise self._failure("decode tokens", error) from error

    def _failure(self, what: str, error: BaseException) -> ValueError:
        """The error to raise for one of the library."""
        kind = "" if type(error) is ValueError else f"{type(error).__name__}: "
        reason = (str(error).strip() or "no reason given").splitlines()[0]
        return ValueError(f"the tokenizer in {self.folder} cannot {what}: {kind}{reason}")

    def token_text(self, token: int) -> str:
        """The text of a single token, special tokens included."""
        if token not in self._token_texts:
            self._token_texts[token] = self.decode([token], skip_special_tokens=False)
        return self._token_texts[token]

    def word_ids(self, word: str) -> list[list[int]]:
        """The token ids of a word at the beginning of a text and, if its first token differs there, after a space."""
        start, inside = (self.encode(space + word.lstrip(), add_special_tokens=False) for space in ("", " "))
        differs = bool(start and inside) and inside[0] != start[0] and len(inside) == len(start)
        return [ids for ids in ([start, inside] if differs else [start]) if ids]


def check_tokenizer(folder: Path) -> None:
    """Checks the tokenizer's files before weights are loaded; a folder without a tokenizer passes.

    Raises:
        CheckpointError: a file is damaged; the text names it.
    """
    from tokenizers import Tokenizer as Read  # a part of transformers, and much quicker to import

    for name, read in (("tokenizer_config.json", json.loads), ("tokenizer.json", Read.from_str)):
        path = folder / name
        try:
            if path.is_file():
                read(path.read_text(encoding="utf-8"))
        except Exception as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise CheckpointError(
                f"{path} is damaged ({reason}); get it again (a git-lfs pointer: with `git lfs pull`)"
            ) from error
