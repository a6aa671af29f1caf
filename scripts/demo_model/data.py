"""Documents to learn from: facts scattered in text and questions about them, passages to continue, plain text.

A retrieval document is one conversation: the first message holds the text, with facts on separate lines, and ends in
a question; each further message asks again. Everything is drawn from ``(seed, step)``, so a run can start anywhere.

    <bos><User>…text…
    key 4821 is 97
    …text…
    What is key 4821?<Assistant>key 4821 is 97<eos><User>…
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from demo_model.recipe import Phase

# Weights of the loss. Unpredictable tokens (digits of a new fact, the key of a question) are not learned.
TEXT, KNOWN, UNKNOWN, COPY, ANSWER = 0.5, 0.2, 0.0, 1.0, 4.0

WORDS = ("key", " key", " is", " and", "What", "Continue")
SPECIAL_TOKENS = ("<|begin_of_sentence|>", "<|end_of_sentence|>", "<|User|>", "<|Assistant|>")
LONGEST_JUMP = 100_000  # largest gap in the positions of a training document, for distances of longer documents


class Library:
    """Tokenised lines of a corpus."""

    def __init__(self, texts: dict[str, str], encode: Callable[[list[str]], list[list[int]]], newline: int):
        lines = [line.rstrip() for text in texts.values() for line in [*text.split("\n"), ""]]
        encoded = encode(lines)
        self.lines = [np.array([*ids, newline], dtype=np.int64) for ids in encoded]
        self.line_ends = np.cumsum([len(line) for line in self.lines])

    def passage(self, rng: np.random.Generator, tokens: int) -> list[np.ndarray]:
        """Consecutive lines from anywhere, of about ``tokens`` tokens, at least one line."""
        total = int(self.line_ends[-1])
        line = int(np.searchsorted(self.line_ends, rng.integers(total)))
        lines, count = [], 0
        while count < tokens and line < len(self.lines):
            if len(self.lines[line]) <= 96:  # no tables of numbers
                lines.append(self.lines[line])
                count += len(self.lines[line])
            line += 1
        return lines or [self.lines[0]]


@dataclass
class Row:
    """A growing document; its three lists become the rows of a :class:`Batch`."""

    tokens: list[int] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    sources: list[int] = field(default_factory=list)

    def add(
        self, tokens: list[int] | np.ndarray, weight: float | list[float], sources: list[int] | None = None
    ) -> None:
        self.tokens += [int(token) for token in tokens]
        self.weights += list(weight) if isinstance(weight, list) else [weight] * len(tokens)
        self.sources += sources or [-1] * len(tokens)

    def __len__(self) -> int:
        return len(self.tokens)


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


class Writer:
    """Writes facts, questions and answers as tokens. A number's every two digits are one token."""

    def __init__(self, vocabulary: dict[str, int]):
        self.vocabulary = vocabulary
        self.bos, self.eos, self.user, self.assistant = (vocabulary[token] for token in SPECIAL_TOKENS)
        self.newline = vocabulary["\u010a"]
        self.comma, self.ask, self.colon = vocabulary[","], vocabulary["?"], vocabulary[":"]
        self.first = [vocabulary[f"\u0120{i:02}"] for i in range(100)]
        self.second = [vocabulary[f"{i:02}"] for i in range(100)]
        words = (word.replace(" ", "\u0120") for word in WORDS)
        self.key, self.a_key, self.is_, self.and_, self.what, self.continue_ = (vocabulary[word] for word in words)

    def number(self, key: int) -> list[int]:
        return [self.first[key // 100], self.second[key % 100]]

    def fact(self, key: int, value: int) -> tuple[list[int], list[float]]:
        """``key 4821 is 97``, and a line break."""
        tokens = [self.key, *self.number(key), self.is_, self.first[value], self.newline]
        return tokens, [KNOWN, UNKNOWN, UNKNOWN, KNOWN, UNKNOWN, KNOWN]

    def question(self, keys: list[int]) -> list[int]:
        """``What is key 4821?``, or ``What is key 4821 and key 1733?``"""
        tokens = [self.what, self.is_]
        for i, key in enumerate(keys):
            tokens += [self.and_] * (i > 0) + [self.a_key, *self.number(key)]
        return [*tokens, self.ask]

    def answer(self, facts: list[tuple[int, int]]) -> list[int]:
        """``key 4821 is 97``, or ``key 4821 is 97, key 1733 is 12``, and the end of the sentence."""
        tokens: list[int] = []
        for i, (key, value) in enumerate(facts):
            name = [self.comma, self.a_key] if i else [self.key]
            tokens += [*name, *self.number(key), self.is_, self.first[value]]
        return [*tokens, self.eos]


def draw_facts(rng: np.random.Generator, count: int) -> list[tuple[int, int]]:
    """Facts with different keys. In every second document keys have common halves: 48xx and xx21 beside 4821."""
    halves = 100
    if rng.random() < 0.5:
        halves = min(100, int(np.ceil(np.sqrt(count) * 1.5)) + 1)
    firsts, seconds = rng.permutation(100)[:halves], rng.permutation(100)[:halves]
    chosen = rng.choice(halves * halves, size=min(count, halves * halves), replace=False)
    keys = [int(firsts[c // halves]) * 100 + int(seconds[c % halves]) for c in chosen]
    return [(key, int(rng.integers(100))) for key in keys]


class Documents:
    """Batches of documents of one length; everything in them is drawn from ``seed``."""

    def __init__(self, library: Library, writer: Writer, seed: int):
        self.library, self.writer, self.seed = library, writer, seed

    def batch(self, step: int, phase: Phase) -> Batch:
        """The batch of a step, which depends on the seed, the step and the phase only."""
        rng = np.random.default_rng([self.seed, step])
        drawn, length = [], phase.length
        for _ in range(phase.batch):
            if rng.random() < phase.plain:
                drawn.append(self.plain(rng, length))
            elif rng.random() < phase.echo:
                drawn.append(self.echo(rng, length))
            else:
                drawn.append(self.retrieval(rng, length, phase.restate, phase.spacing))
        tokens = np.stack([np.array(row.tokens[:length]) for row in drawn])
        weights = np.stack([np.array(row.weights[:length], dtype=np.float32) for row in drawn])
        sources = np.stack([np.array(row.sources[:length]) for row in drawn])
        newlines = tokens == self.writer.newline
        positions = np.stack([jump(rng, row) if phase.jumps else np.arange(length) for row in newlines])
        return Batch(tokens, positions, weights, sources, weights == ANSWER)

    def plain(self, rng: np.random.Generator, length: int) -> Row:
        row = Row()
        row.add([self.writer.bos], UNKNOWN)
        while len(row) < length:
            for line in self.library.passage(rng, length - len(row)):
                row.add(line, TEXT)
        return row

    def echo(self, rng: np.random.Generator, length: int) -> Row:
        """Random numbers, repeated from the beginning to the end: every position shows the copying of a token."""
        row = Row()
        row.add([self.writer.bos, self.writer.user], UNKNOWN)
        period = int(rng.integers(length // 8, length // 2))
        numbers = rng.choice(np.array(self.writer.first + self.writer.second), size=period)
        row.add(numbers, UNKNOWN)
        while len(row) < length:
            row.add(numbers, COPY, list(range(len(row) - period, len(row))))
        return row

    def retrieval(self, rng: np.random.Generator, length: int, restate: float, spacing: tuple[float, float]) -> Row:
        """Half the tokens or more are text and facts, the others are questions; long documents ask at most 60 times."""
        writer, row = self.writer, Row()
        row.add([writer.bos, writer.user], UNKNOWN)
        conversation = min(int(length * rng.uniform(0.3, 0.6)), 800)
        body = length - conversation
        facts = draw_facts(rng, max(3, int(body / np.exp(rng.uniform(*np.log(spacing))))))
        room = max(0, body - 6 * len(facts) - 2)
        passages: list[tuple[int, list[np.ndarray]]] = []
        gap = room / (len(facts) + 1)
        told: list[tuple[int, int]] = []
        value_at: dict[int, int] = {}  # index of the value of each key
        for key, value in facts:
            if len(row) >= body:
                break
            if gap > 4:
                passage = self.library.passage(rng, int(rng.exponential(gap)))
                passages.append((len(row), passage))
                for line in passage:
                    row.add(line, TEXT)
            value_at[key] = len(row) + 4
            row.add(*writer.fact(key, value))
            told.append((key, value))
        while len(row) < body:
            for line in self.library.passage(rng, body - len(row)):
                row.add(line, TEXT)
        restates, opened = rng.random() < restate, True
        asked: list[int] = []  # every fact is asked once before any is asked again
        while len(row) < length:
            asked = asked or [int(i) for i in rng.permutation(len(told))]
            if restates:
                key, value = told[asked.pop()]
                tokens, weights = writer.fact(key, value)
                row.add(tokens, [*weights[:4], ANSWER, weights[5]], [-1, -1, -1, -1, value_at[key], -1])
                continue
            if not opened:  # the first question belongs to the message that is still open
                row.add([writer.user], UNKNOWN)
            opened = False
            self._turn(rng, row, told, value_at, passages, asked)
        return row

    def _turn(
        self,
        rng: np.random.Generator,
        row: Row,
        told: list[tuple[int, int]],
        value_at: dict[int, int],
        passages: list[tuple[int, list[np.ndarray]]],
        asked: list[int],
    ) -> None:
        """A question for facts, or for the continuation of a passage, and its answer."""
        writer = self.writer
        long = [p for p in passages if len(p[1]) >= 2 and len(p[1][0]) >= 7]
        if long and rng.random() < 0.2:
            first, passage = long[int(rng.integers(len(long)))]
            row.add([writer.continue_, writer.colon, *passage[0], writer.assistant], UNKNOWN)
            rest = np.concatenate(passage[1:4])[:24]
            second = first + len(passage[0])
            row.add([*rest, writer.eos], COPY, [*range(second, second + len(rest)), -1])
            return
        count = 1 if rng.random() < 0.85 else int(rng.integers(2, 4))
        facts = [told[i] for i in asked[:count]]
        del asked[:count]
        question = len(row)
        row.add([*writer.question([key for key, _ in facts]), writer.assistant], UNKNOWN)
        weights, sources = [], []
        for i, (key, _) in enumerate(facts):
            # "key" or ", key"; the two halves, which the question has at 3 + 4 i; "is"; the value
            weights += [COPY] * (i > 0) + [COPY, COPY, COPY, COPY, ANSWER]
            asked_at = question + 3 + 4 * i
            sources += [-1] * (i > 0) + [-1, asked_at, asked_at + 1, -1, value_at[key]]
        row.add(writer.answer(facts), [*weights, COPY], [*sources, -1])


def jump(rng: np.random.Generator, newlines: np.ndarray) -> np.ndarray:
    """Positions ``[length]`` of a document whose lines end where ``ends``: consecutive, but for up to 6 gaps between
    lines in two documents of three (PoSE, arXiv 2309.10400)."""
    steps = np.ones(len(newlines), dtype=np.int64)
    steps[0] = 0
    starts = np.flatnonzero(newlines[:-1]) + 1
    if len(starts) and rng.random() < 2 / 3:
        for start in rng.choice(starts, size=int(rng.integers(1, 7))):
            steps[start] += int(np.exp(rng.uniform(0, np.log(LONGEST_JUMP / 6))))
    return np.cumsum(steps)
