"""The checkpoint's tokenizer, and text that grows token by token; ``transformers`` is imported at first use."""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from functools import cached_property, partial
from pathlib import Path
from threading import Lock
from typing import Any

from dsa_engine.config.checks import check_text
from dsa_engine.errors import CheckpointError, ContextLengthError
from dsa_engine.outputs import Logprobs

THINKING = ("<think>", "</think>")  # texts of the tokens that begin and end a thought

# Maximum number of tokens whose text is held back because they may still become a character.
_MAX_PENDING = 12

# Modules of transformers put others in their place when they are imported: a second thread gets one without its names.
_importing = Lock()


class Tokenizer:
    """The tokenizer of a model folder.

    What fails in it is a ``ValueError`` that names the folder, even a panic of its Rust code, which is no
    ``Exception``. So it fails the request whose text is at fault, and no other.
    ``hf`` is the tokenizer object of ``transformers``.
    """

    def __init__(self, folder: Path, trust_remote_code: bool = False):
        if not self.lies_in(folder):
            raise ValueError(
                f"{folder} has no tokenizer; give prompts as lists of token ids, and no stop strings or bad words"
            )
        with _importing:
            from transformers import AutoTokenizer, PreTrainedTokenizerFast

        self.folder = folder
        self._token_texts: dict[int, tuple[str, bytes]] = {}
        self._alone: dict[tuple[int, bool], str] = {}  # texts by token, and whether special ones are skipped
        try:
            with _importing:  # more modules, as the folder needs them
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
        # The library's warning of texts beyond the model's length, which `Limits.check` refuses in words of its own.
        self.hf.deprecation_warnings["sequence-length-is-longer-than-the-specified-maximum"] = True
        # What the library adds to its Rust code takes longer than that; a tokenizer that changes texts needs it.
        kind, library = type(self.hf), PreTrainedTokenizerFast
        plain = isinstance(self.hf, library) and kind.decode is library.decode and kind._decode is library._decode
        self._decoder = self.hf.backend_tokenizer if plain and not self.hf.clean_up_tokenization_spaces else self.hf
        # Whether the text of tokens is that of their bytes, one token's after the other's: as in released models.
        self.joins_bytes = self._decoder is not self.hf and repr(self._decoder.decoder).startswith("ByteLevel(")

    @staticmethod
    def lies_in(folder: Path) -> bool:
        """Whether the folder has a tokenizer."""
        return any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model"))

    @cached_property
    def longest_token(self) -> int:
        """The bytes of text that a token stands for at most."""
        backend, added = getattr(self.hf, "backend_tokenizer", None), self.hf.get_added_vocab()
        by_bytes = "ByteLevel" in repr(getattr(backend, "decoder", None))  # each letter of a token is a byte
        texts = self.hf.get_vocab()
        return max(len(text) if by_bytes and text not in added else len(text.encode()) for text in texts)

    @cached_property
    def tags(self) -> dict[str, int]:
        """Ids, by text, of the tokens that no text has in a grammar: special ones, and ``<…>``, which released
        tokenizers do not call special."""
        added = self.hf.added_tokens_decoder.items()
        is_tag = re.compile("(?s)<.*>").fullmatch
        return {token.content: number for number, token in added if token.special or is_tag(token.content)}

    def encode(self, text: str, add_special_tokens: bool = True, max_tokens: int | None = None) -> list[int]:
        """Token ids of a text. If the text begins with the token that begins every text (BOS), it gets no second one.

        A text with more bytes than ``max_tokens`` of the longest tokens is refused before it is encoded, which takes
        hundreds of bytes of memory for each of its own.
        """
        check_text("the text", text)
        if max_tokens is not None and len(text) > max_tokens:  # most texts are shorter
            size, limit = len(text.encode()), max_tokens * self.longest_token
            if size > limit:
                raise ContextLengthError.of(
                    max_tokens,
                    f"the prompt has {size} bytes, where so many tokens have at most {limit}; shorten the prompt or "
                    "raise max_model_len",
                )
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
        """The text of token ids; raises ``ValueError`` if the tokenizer fails. A stream asks again and again for those
        of single tokens."""
        if len(ids) == 1 and (known := self._alone.get((ids[0], skip_special_tokens))) is not None:
            return known
        try:
            text = str(self._decoder.decode(ids, skip_special_tokens=skip_special_tokens))
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            raise self._failure("decode tokens", error) from error
        if len(ids) == 1:
            self._alone[ids[0], skip_special_tokens] = text
        return text

    def _failure(self, what: str, error: BaseException) -> ValueError:
        kind = "" if type(error) is ValueError else f"{type(error).__name__}: "
        reason = (str(error).strip() or "no reason given").splitlines()[0]
        return ValueError(f"the tokenizer in {self.folder} cannot {what}: {kind}{reason}")

    def token_text(self, token: int) -> str:
        """The text of a single token, special tokens included."""
        return self.token_text_and_bytes(token)[0]

    def token_text_and_bytes(self, token: int) -> tuple[str, bytes]:
        """The text of a single token, and its bytes in UTF-8, which may be a part of a character."""
        if token not in self._token_texts:
            text = self.decode([token], skip_special_tokens=False)
            spelled = self._bytes_of(token) if "\ufffd" in text else None
            self._token_texts[token] = text, spelled or text.encode("utf-8", "replace")
        return self._token_texts[token]

    def _bytes_of(self, token: int) -> bytes | None:
        """The bytes of a token as its entry of the vocabulary spells them; None if it does not."""
        from transformers.convert_slow_tokenizer import bytes_to_unicode

        piece = str(self.hf.convert_ids_to_tokens(token))
        if byte := re.fullmatch("<0x([0-9A-F]{2})>", piece):  # as sentencepiece has it
            return bytes.fromhex(byte[1])
        byte_of = {letter: byte for byte, letter in bytes_to_unicode().items()}
        return bytes(map(byte_of.__getitem__, piece)) if byte_of.keys() >= {*piece} else None

    def word_ids(self, word: str) -> list[list[int]]:
        """The token ids of a word at the beginning of a text and, if its first token differs there, after a space."""
        start, inside = (self.encode(space + word.lstrip(), add_special_tokens=False) for space in ("", " "))
        differs = bool(start and inside) and inside[0] != start[0] and len(inside) == len(start)
        return [ids for ids in ([start, inside] if differs else [start]) if ids]


def check_tokenizer(folder: Path) -> None:
    """Checks the tokenizer's files before weights are loaded; a folder without a tokenizer passes."""
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


class TextStream:
    """Turns a growing list of tokens into text, ends it at a stop string, and releases text once it is final.

    A character may need several tokens, and a stop string may span several; text that could still change is held back.

    Args:
        min_tokens: number of first tokens whose text is not searched for stop strings.
        include_stop: the text ends after the stop string, not before it.
        streams: text is wanted before the end. Without it, and without stop strings, it is made once, at the end.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: tuple[str, ...] = (),
        min_tokens: int = 0,
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        streams: bool = True,
    ):
        self._tokenizer = tokenizer
        self._decode = partial(tokenizer.decode, skip_special_tokens=skip_special_tokens)
        self._stop, self._sorted_stop = stop, sorted(stop)
        self._longest = max(map(len, stop), default=0)
        self._min_tokens = min_tokens
        self._include_stop = include_stop
        self._waits = not (streams or stop)
        self._tokens: list[int] = []
        self._settled = 0  # tokens whose text can no longer change
        self._window = 0  # decoding starts here, before the settled tokens, to keep spaces between words
        self._before = ""  # the text of the settled tokens from there on
        self._final: list[str] = []  # text that can no longer change and has not been given
        self._tail = ""  # text after it, with which a stop string may begin
        self.stop_string: str | None = None  # the one that the text has reached

    def decoded(self, logprobs: Logprobs) -> Logprobs:
        """``logprobs``, each with the text of its token from now on."""
        for token, one in logprobs.items():
            one.decoded_token, one.bytes = self._tokenizer.token_text_and_bytes(token)
        return logprobs

    def add(self, token: int) -> None:
        """Appends a token."""
        self._tokens.append(token)
        if self._waits:
            return
        after = self._decode(self._tokens[self._window :])
        settled = len(self._tokens)
        if after.endswith("\ufffd"):  # an unfinished character
            if settled - self._settled < _MAX_PENDING:
                return
            settled, after = self._whole_characters()
        new = after[len(self._before) :]
        if self._tokenizer.joins_bytes and not after.endswith("\ufffd"):  # what comes does not depend on what was
            self._window, self._settled, self._before = settled, settled, ""
        else:
            self._window, self._settled = self._settled, settled
            self._before = self._decode(self._tokens[self._window : settled])
        if not self._stop or len(self._tokens) <= self._min_tokens:
            self._final.append(new)
        else:
            self._search(self._tail + new)

    def _search(self, text: str) -> None:
        """Looks for stop strings in a text, and keeps back its end if one may begin there."""
        end = len(text)
        if stops := [(p, s) for s in self._stop if (p := text.find(s)) >= 0]:
            first, self.stop_string = min(stops, key=lambda stop: stop[0])
            end = first + (len(self.stop_string) if self._include_stop else 0)
            text = text[:end]
        else:
            end = next(at for at in range(max(0, end - self._longest + 1), end + 1) if self._may_stop(text[at:]))
        self._final.append(text[:end])
        self._tail = text[end:]

    def _may_stop(self, text: str) -> bool:
        after = bisect_left(self._sorted_stop, text)
        return after < len(self._sorted_stop) and self._sorted_stop[after].startswith(text)

    def _whole_characters(self) -> tuple[int, str]:
        """How many tokens can be settled although some never complete a character, and the text of the window.

        A character has at most 4 bytes and a token at least one, so bytes that are no character after 4 more tokens
        never will be. Without this, every further token would decode all of them again.
        """
        last = len(self._tokens) - 4
        for end in range(len(self._tokens) - 1, self._settled, -1):
            text = self._decode(self._tokens[self._window : end])
            if not text.endswith("\ufffd"):
                return end, text
        return last, self._decode(self._tokens[self._window : last])

    def finish(self) -> None:
        """Ends the stream: no text is held back any longer; an unfinished character at the end is decoded as it is."""
        self._final.append(self._tail)
        if self.stop_string is None and self._settled < len(self._tokens):
            self._final.append(self._decode(self._tokens[self._window :])[len(self._before) :])
        self._tail, self._settled = "", len(self._tokens)

    def new_text(self) -> str:
        """The text that became final since the last call; all text once it is finished or stopped."""
        text = "".join(self._final)
        self._final.clear()
        return text
