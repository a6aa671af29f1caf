"""Text in and out: the checkpoint's tokenizer, through ``transformers``, imported when text is first used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dsa_engine.chat_template import render
from dsa_engine.errors import CheckpointError
from dsa_engine.outputs import Logprob, Logprobs


class Tokenizer:
    """The tokenizer of a model folder.

    Args:
        folder: of the model.
        trust_remote_code: let the folder run Python of its own, if its tokenizer wants to.

    Attributes:
        hf: the tokenizer of ``transformers``.

    Raises:
        ValueError: the folder wants to run code of its own and is not trusted, or its tokenizer cannot be read.
    """

    def __init__(self, folder: Path, trust_remote_code: bool = False):
        from transformers import AutoTokenizer

        self._folder = folder
        self._token_texts: dict[int, str] = {}
        try:
            # Said in every case: left out, transformers asks on stdin, where a prompt may come down a pipe.
            self.hf: Any = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=trust_remote_code)
        except Exception as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            advice = ""
            if "trust_remote_code" in str(error) and not trust_remote_code:
                advice = "; it wants to run Python code of that folder: if you trust it, give trust_remote_code=True"
            raise ValueError(f"the tokenizer in {folder} cannot be read: {reason}{advice}") from error

    @staticmethod
    def lies_in(folder: Path) -> bool:
        """Whether the folder has a tokenizer at all."""
        return any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model"))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return self.hf.encode(text, add_special_tokens=add_special_tokens)

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return self.hf.decode(ids, skip_special_tokens=skip_special_tokens)

    def token_text(self, token: int) -> str:
        """The text of a token by itself, also of a special one."""
        if token not in self._token_texts:
            self._token_texts[token] = self.decode([token], skip_special_tokens=False)
        return self._token_texts[token]

    def word_ids(self, word: str) -> list[list[int]]:
        """The token ids of a word as it stands at the beginning of a text and, where that is a token of another kind,
        behind a space."""
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
    """Says before anything is loaded that a file of the tokenizer is damaged; a folder without any is fine.

    Raises:
        CheckpointError: names the file.
    """
    path = folder / "tokenizer_config.json"
    if path.is_file():
        try:
            json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise CheckpointError(f"{path} is not valid JSON ({error}); get the file again") from error
    path = folder / "tokenizer.json"
    if path.is_file():
        from tokenizers import Tokenizer as Read  # of transformers, and much quicker to import

        try:
            Read.from_file(str(path))
        except Exception as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            with path.open("rb") as file:
                pointer = file.read(40).startswith(b"version https://git-lfs")
            advice = "it is a git-lfs pointer: run `git lfs pull` in its folder" if pointer else "get the file again"
            raise CheckpointError(f"{path} is no tokenizer ({reason}); {advice}") from error


# Tokens whose text is held back because they may still become a character.
_MOST_PENDING = 12


class TextStream:
    """Turns a growing list of tokens into text, ends it at a stop string, and says which text is certain.

    A character may need several tokens, and a stop string may lie across several; what could still change is held back.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: tuple[str, ...] = (),
        min_tokens: int = 0,
        include_stop: bool = False,
        skip_special_tokens: bool = True,
    ):
        self._tokenizer = tokenizer
        self._stop = stop
        self._min_tokens = min_tokens  # no stop string is seen in their text
        self._include_stop = include_stop  # the text ends behind the stop string, not before
        self._skip_special_tokens = skip_special_tokens
        self._searched = 0  # text before this is not searched
        self._tokens: list[int] = []
        self._settled = 0  # tokens whose text can no longer change
        self._window = 0  # decoding starts here, a little before, for the sake of spaces between words
        self._text = ""
        self._given = 0
        self._finished = False
        self.stop_string: str | None = None  # that the text has reached

    @property
    def stopped(self) -> bool:
        """Whether the text has reached a stop string."""
        return self.stop_string is not None

    def decoded(self, logprobs: Logprobs) -> Logprobs:
        """With the text of each token."""
        return {token: Logprob(of, of.rank, self._tokenizer.token_text(token)) for token, of in logprobs.items()}

    def _decode(self, tokens: list[int]) -> str:
        if self._skip_special_tokens:
            return self._tokenizer.decode(tokens)
        return self._tokenizer.decode(tokens, skip_special_tokens=False)

    def add(self, token: int) -> None:
        """Takes a token; ``stopped`` tells whether the text has reached a stop string."""
        self._tokens.append(token)
        before = self._decode(self._tokens[self._window : self._settled])
        after = self._decode(self._tokens[self._window :])
        settled = len(self._tokens)
        if after.endswith("\ufffd"):  # an unfinished character
            if settled - self._settled < _MOST_PENDING:
                return
            settled, after = self._whole_characters()
        first = max(self._searched, len(self._text) - max((len(s) for s in self._stop), default=0))
        self._text += after[len(before) :]
        self._window, self._settled = self._settled, settled
        if len(self._tokens) <= self._min_tokens:
            self._searched = len(self._text)
            return
        places = [(p, s) for s in self._stop if (p := self._text.find(s, first)) >= 0]
        if places:
            place, self.stop_string = min(places, key=lambda found: found[0])
            self._text = self._text[: place + (len(self.stop_string) if self._include_stop else 0)]

    def _whole_characters(self) -> tuple[int, str]:
        """Up to where tokens that never complete a character can be settled, and the text up to there.

        A character has at most 4 bytes, and a token at least one: what has not become a character 4 tokens later never
        will. Without this, every further token would decode all of them again.
        """
        last = len(self._tokens) - 4
        for end in range(len(self._tokens) - 1, self._settled, -1):
            text = self._decode(self._tokens[self._window : end])
            if not text.endswith("\ufffd"):
                return end, text
        return last, self._decode(self._tokens[self._window : last])

    def finish(self) -> str:
        """The whole text, no token being to come; an unfinished character at the end is decoded as it stands."""
        if not self.stopped and self._settled < len(self._tokens):
            before = self._decode(self._tokens[self._window : self._settled])
            self._text += self._decode(self._tokens[self._window :])[len(before) :]
            self._settled = len(self._tokens)
        self._finished = True
        return self._text

    def new_text(self) -> str:
        """Text that has become certain since the last call: all of it, once the text is finished or stopped."""
        end = len(self._text)
        if not self._finished and not self.stopped:
            end -= max((_overlap(self._text, s) for s in self._stop), default=0)
        piece = self._text[self._given : end]
        self._given = max(self._given, end)
        return piece


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that begins ``stop``."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
