"""Documents to learn from: facts scattered in text and questions about them, and plain text.

A retrieval document is one conversation: the first message holds the text, with facts on separate lines, and ends in
a question; each further message asks again. Everything is drawn from ``(seed, step)``.

    <bos><User>…text…
    key 4821 is 97
    …text…
    What is key 4821?<Assistant>key 4821 is 97<eos><User>…

The text is Python's own standard library and language reference, under the PSF licence: the files of the interpreter
that runs the training. Whole files are held out for evaluation, chosen by a hash of their names.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from demo_model.recipe import SEED, Phase
from dsa_engine.demo import trained_folder

# Weights of the loss. Unpredictable tokens (digits of a new fact, the key of a question) are not learned.
TEXT, KNOWN, UNKNOWN, COPY, ANSWER = 0.5, 0.2, 0.0, 1.0, 4.0

WORDS = ("\u010a", "?", "key", "\u0120key", "\u0120is", "What")  # as the tokenizer stores a line break and spaces
SPECIAL_TOKENS = ("<|begin_of_sentence|>", "<|end_of_sentence|>", "<|User|>", "<|Assistant|>")
LONGEST_JUMP = 100_000  # largest gap in the positions of a training document, for distances of longer documents
HELD_OUT = 16  # one file in 16 is held out


def standard_library() -> tuple[dict[str, str], dict[str, str]]:
    """Texts by name, for training and held out: sources of the standard library's top folder and the topics of the
    language reference (``pydoc_data``)."""
    from pydoc_data.topics import topics

    texts = {f"topics/{name}": text for name, text in topics.items()}
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        texts[path.name] = path.read_text(encoding="utf-8", errors="replace")
    parts: tuple[dict[str, str], ...] = ({}, {})
    for name, text in sorted(texts.items()):
        number = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big")
        parts[number % HELD_OUT == 0][name] = text.replace("\t", "    ")
    return parts[0], parts[1]


class Row(list[tuple[int, float, int]]):
    """A growing document: of each token its id, weight and source, as in a :class:`Batch`."""

    def add(self, tokens: Iterable[int], weights: float | list[float], sources: Iterable[int] = repeat(-1)) -> None:
        each = weights if isinstance(weights, list) else repeat(weights)
        self.extend(zip(map(int, tokens), each, sources, strict=False))


@dataclass(frozen=True)
class Batch:
    """``tokens``, ``positions`` int64 and ``weights`` float32 ``[B, L]``: of each token as a target of the loss.

    ``sources`` int64 ``[B, L]``: index of the earlier occurrence of a repeated token, or -1; ``asked`` bool: an asked
    value.
    """

    tokens: np.ndarray
    positions: np.ndarray
    weights: np.ndarray
    sources: np.ndarray
    asked: np.ndarray


def draw_facts(rng: np.random.Generator, count: int) -> list[tuple[int, int]]:
    """Facts with different keys. In every second document keys have common halves: 48xx and xx21 beside 4821."""
    halves = min(100, int(np.ceil(np.sqrt(count) * 1.5)) + 1) if rng.random() < 0.5 else 100
    firsts, seconds = rng.permutation(100)[:halves], rng.permutation(100)[:halves]
    chosen = rng.choice(halves * halves, size=min(count, halves * halves), replace=False)
    keys = [int(firsts[c // halves]) * 100 + int(seconds[c % halves]) for c in chosen]
    return [(key, int(rng.integers(100))) for key in keys]


class Documents:
    """Batches of documents of one length about ``texts``, in the shipped model's tokens; a number's every two digits
    are one token."""

    def __init__(self, texts: dict[str, str], seed: int = SEED):
        tokenizer, self.seed = Tokenizer.from_file(str(trained_folder() / "tokenizer.json")), seed
        of = tokenizer.get_vocab()
        self.bos, self.eos, self.user, self.assistant = (of[token] for token in SPECIAL_TOKENS)
        self.newline, self.ask, self.key, self.a_key, self.is_, self.what = (of[word] for word in WORDS)
        self.first, self.second = [of[f"\u0120{i:02}"] for i in range(100)], [of[f"{i:02}"] for i in range(100)]
        lines = [line.rstrip() for text in texts.values() for line in [*text.split("\n"), ""]]
        encoded = tokenizer.encode_batch(lines, add_special_tokens=False)
        self._lines = [np.array([*line.ids, self.newline], dtype=np.int64) for line in encoded]
        self._line_ends = np.cumsum([len(line) for line in self._lines])

    def passage(self, rng: np.random.Generator, tokens: int) -> list[np.ndarray]:
        """Consecutive lines from anywhere, of about ``tokens`` tokens, at least one line."""
        line = int(np.searchsorted(self._line_ends, rng.integers(int(self._line_ends[-1]))))
        lines, count = [], 0
        while count < tokens and line < len(self._lines):
            if len(self._lines[line]) <= 96:  # no tables of numbers
                lines.append(self._lines[line])
                count += len(self._lines[line])
            line += 1
        return lines or [self._lines[0]]

    def number(self, key: int) -> list[int]:
        return [self.first[key // 100], self.second[key % 100]]

    def fact(self, key: int, value: int) -> list[int]:
        """``key 4821 is 97``, and a line break."""
        return [self.key, *self.number(key), self.is_, self.first[value], self.newline]

    def question(self, key: int) -> list[int]:
        """``What is key 4821?``, and the beginning of the answer."""
        return [self.what, self.is_, self.a_key, *self.number(key), self.ask, self.assistant]

    def answer(self, key: int, value: int) -> list[int]:
        """``key 4821 is 97``, and the end of the sentence."""
        return [*self.fact(key, value)[:5], self.eos]

    def batch(self, step: int, phase: Phase) -> Batch:
        """The batch of a step, which depends on the seed, the step and the phase only."""
        rng = np.random.default_rng([self.seed, step])
        drawn, length = [], phase.length
        for _ in range(phase.batch):
            if rng.random() < phase.plain:
                row = Row([(self.bos, UNKNOWN, -1)])
                self._add_text(rng, row, length)
                drawn.append(row)
            elif rng.random() < phase.echo:
                drawn.append(self._echo(rng, length))
            else:
                drawn.append(self._retrieval(rng, length, phase.spacing))
        tokens, weights, sources = np.moveaxis(np.array([row[:length] for row in drawn]), 2, 0)  # float64
        newlines = tokens == self.newline
        positions = np.stack([_jump(rng, row) if phase.jumps else np.arange(length) for row in newlines])
        integers, asked = (tokens.astype(np.int64), positions), weights == ANSWER
        return Batch(*integers, weights.astype(np.float32), sources.astype(np.int64), asked)

    def _add_text(self, rng: np.random.Generator, row: Row, until: int) -> None:
        while len(row) < until:
            for line in self.passage(rng, until - len(row)):
                row.add(line, TEXT)

    def _echo(self, rng: np.random.Generator, length: int) -> Row:
        """Random numbers, repeated from the beginning to the end: every position shows the copying of a token."""
        row = Row()
        row.add([self.bos, self.user], UNKNOWN)
        period = int(rng.integers(length // 8, length // 2))
        numbers = rng.choice(np.array(self.first + self.second), size=period)
        row.add(numbers, UNKNOWN)
        while len(row) < length:
            row.add(numbers, COPY, list(range(len(row) - period, len(row))))
        return row

    def _retrieval(self, rng: np.random.Generator, length: int, spacing: tuple[float, float]) -> Row:
        """Half the tokens or more are text and facts, the others are questions; long documents ask at most 60 times."""
        row = Row()
        row.add([self.bos, self.user], UNKNOWN)
        body = length - min(int(length * rng.uniform(0.3, 0.6)), 800)
        facts = draw_facts(rng, max(3, int(body / np.exp(rng.uniform(*np.log(spacing))))))
        gap = max(0, body - 6 * len(facts) - 2) / (len(facts) + 1)
        value_at: dict[tuple[int, int], int] = {}  # index of the value of each told fact
        for key, value in facts:
            if len(row) >= body:
                break
            if gap > 4:
                for line in self.passage(rng, int(rng.exponential(gap))):
                    row.add(line, TEXT)
            value_at[key, value] = len(row) + 4
            row.add(self.fact(key, value), [KNOWN, UNKNOWN, UNKNOWN, KNOWN, UNKNOWN, KNOWN])
        self._add_text(rng, row, body)
        told, asked = [*value_at], list[int]()  # every fact is asked once before any is asked again
        while len(row) < length:
            asked = asked or [int(i) for i in rng.permutation(len(told))]
            fact = told[asked.pop()]
            if row[-1][0] == self.eos:  # the first question belongs to the message that is still open
                row.add([self.user], UNKNOWN)
            at = len(row) + 3  # of the key in the question
            row.add(self.question(fact[0]), UNKNOWN)
            sources = [-1, at, at + 1, -1, value_at[fact], -1]
            row.add(self.answer(*fact), [COPY, COPY, COPY, COPY, ANSWER, COPY], sources)
        return row


def _jump(rng: np.random.Generator, newlines: np.ndarray) -> np.ndarray:
    """Positions ``[length]`` of a document whose lines end where ``newlines``: consecutive, but for up to 6 gaps
    between lines in two documents of three (PoSE, arXiv 2309.10400)."""
    steps = np.ones(len(newlines), dtype=np.int64)
    steps[0] = 0
    starts = np.flatnonzero(newlines[:-1]) + 1
    if len(starts) and rng.random() < 2 / 3:
        for start in rng.choice(starts, size=int(rng.integers(1, 7))):
            steps[start] += int(np.exp(rng.uniform(0, np.log(LONGEST_JUMP / 6))))
    return np.cumsum(steps)
