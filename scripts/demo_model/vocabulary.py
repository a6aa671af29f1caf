"""The tokenizer: byte-level BPE that splits a number into groups of two digits, and a text into lines.

``key 4821 is 97`` is always ``key``, `` 48``, ``21``, `` is``, `` 97``: a fact is five tokens, and its key two. A line
break is one token that merges with nothing, so that the tokens of a text are the tokens of its lines, put together.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

BOS, EOS, USER, ASSISTANT = "<|begin_of_sentence|>", "<|end_of_sentence|>", "<|User|>", "<|Assistant|>"
SPECIAL_TOKENS = (BOS, EOS, USER, ASSISTANT)
VOCAB_SIZE = 768
SPACE = "\u0120"  # a space in byte-level tokenizers

# A line break; a pair of digits with or without its space; a digit; a word; signs; spaces before a word; spaces.
PATTERN = r"\n| ?[0-9]{2}|[0-9]| ?[A-Za-z]+| ?[^\sA-Za-z0-9]+|[^\S\n]+(?!\S)|[^\S\n]+"


def train_tokenizer(texts: Iterable[str], words: Iterable[str], vocab_size: int = VOCAB_SIZE) -> str:
    """``tokenizer.json`` with at most ``vocab_size`` tokens.

    Merges are learned from ``texts``; digits merge by rule: every pair, and every pair with the space before it.

    Args:
        texts: texts from which merges are learned.
        words: words, with their space, that must be one token each.
        vocab_size: maximum number of tokens.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    def split() -> Any:
        from tokenizers import Regex

        return pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(PATTERN), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )

    def without_digits(text: str) -> str:
        return "".join(" " if c in "0123456789" else c for c in text)

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = [a + b for a in "0123456789" for b in "0123456789"]
    merges = [(pair[0], pair[1]) for pair in pairs] + [(SPACE, pair) for pair in pairs]
    learned = Tokenizer(models.BPE())
    learned.pre_tokenizer = split()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False)
    learned.train_from_iterator([without_digits(text) for text in texts], trainer)
    vocabulary = [*SPECIAL_TOKENS, *alphabet, *pairs, *(SPACE + pair for pair in pairs)]
    for word in words:
        _add_word(word.replace(" ", SPACE), vocabulary, merges)
    for first, second in json.loads(learned.to_str())["model"]["merges"]:
        known = first in vocabulary and second in vocabulary and first + second not in vocabulary
        if known and len(vocabulary) < vocab_size:
            vocabulary.append(first + second)
            merges.append((first, second))
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(vocabulary)}, merges=merges))
    tokenizer.pre_tokenizer = split()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, 0)]
    )
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    return str(tokenizer.to_str(pretty=False))


def _add_word(word: str, vocabulary: list[str], merges: list[tuple[str, str]]) -> None:
    """Adds the merges of a word from the left, ``k e`` and ``ke y``, and last that of the space before it."""
    bare = word.removeprefix(SPACE)
    pairs = [(bare[:end], bare[end]) for end in range(1, len(bare))]
    for first, second in pairs + [(SPACE, bare)] * (word != bare):
        if first + second not in vocabulary:
            vocabulary.append(first + second)
            merges.append((first, second))
