"""Retrieval cases: a document with scattered facts, and questions about facts at every depth of it.

A case is a document and a question. The questions of a document follow each other in one conversation, each with its
right answer, so a single prefill answers all of them: the greedy answer is, token by token, the argmax at the previous
position. Facts are spread evenly; the text between them is held out.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from demo_model.data import Documents, draw_facts

KINDS = ("fact", "two", "continue")  # one fact; two facts; 24 tokens of a passage far back
PASSAGE = 24


@dataclass(frozen=True)
class Question:
    """Positions of a question: ``answer`` of its answer's tokens, ``needle`` of the tokens that the answer repeats.

    For the last part of the answer, ``asks`` is the position before the value, which predicts it, and ``value`` its
    position in the document.
    """

    answer: range
    needle: tuple[int, ...]
    asks: int
    value: int
    depth: float


@dataclass
class Conversation:
    """A document of ``length`` tokens followed by its questions."""

    length: int
    tokens: list[int] = field(default_factory=list)
    questions: list[Question] = field(default_factory=list)


def conversation(
    documents: Documents, length: int, seed: int, *, kind: str = "fact", questions: int = 10, spacing: int = 64
) -> Conversation:
    """A document of exactly ``length`` tokens, with one fact in every ``spacing``, and its questions.

    Args:
        documents: held-out text, and the writer of facts.
        length: tokens before the first question.
        seed: seed of everything drawn; the same arguments give the same tokens.
        kind: one of :data:`KINDS`.
        questions: number of questions, one per part of the document, in random order.
        spacing: tokens of the document per fact.

    Raises:
        ValueError: an unknown kind, or a document too short for so many questions.
    """
    count = length // spacing
    if kind not in KINDS or count < questions:
        raise ValueError(
            f"a document of {length} tokens has {count} facts: too few for {questions} questions"
            if kind in KINDS
            else f"no such kind of question: {kind!r}; there are {', '.join(KINDS)}"
        )
    rng = np.random.default_rng([seed, length, KINDS.index(kind)])
    writer = documents.writer
    made = Conversation(length, [writer.bos, writer.user])
    facts = draw_facts(rng, count)
    starts: list[int] = []  # positions of the first token of each fact
    passages: list[tuple[int, np.ndarray]] = []  # start and first line of each passage
    for i, (key, value) in enumerate(facts):
        _fill(documents, rng, made.tokens, int((i + 0.5) * length / count) - 6, passages)
        starts.append(len(made.tokens))
        made.tokens += writer.fact(key, value)[0]
    _fill(documents, rng, made.tokens, length, passages)
    for i, part in enumerate(rng.permutation(questions)):
        if i:
            made.tokens.append(writer.user)
        low, high = part / questions, (part + 1) / questions
        if kind == "continue":
            _ask_passage(documents, rng, made, passages, low, high)
        else:
            inside = [j for j, start in enumerate(starts) if low <= start / length < high]
            chosen = [int(rng.choice(inside))]
            chosen += [int(rng.integers(len(facts)))] * (kind == "two")
            _ask_facts(documents, made, [facts[j] for j in chosen], [starts[j] for j in chosen])
    return made


def _fill(
    documents: Documents,
    rng: np.random.Generator,
    tokens: list[int],
    until: int,
    passages: list[tuple[int, np.ndarray]],
) -> None:
    """Adds lines of text up to exactly ``until`` tokens; the last line is cut and keeps its line break."""
    while len(tokens) < until:
        lines = documents.library.passage(rng, until - len(tokens))
        passages.append((len(tokens), lines[0]))
        for line in lines:
            room = until - len(tokens)
            if room:
                tokens += (
                    [int(token) for token in line]
                    if len(line) <= room
                    else [*map(int, line[: room - 1]), int(line[-1])]
                )


def _ask_facts(documents: Documents, made: Conversation, facts: list[tuple[int, int]], starts: list[int]) -> None:
    writer = documents.writer
    made.tokens += [*writer.question([key for key, _ in facts]), writer.assistant]
    first = len(made.tokens)
    made.tokens += writer.answer(facts)
    needle = tuple(start + i for start in starts for i in range(5))
    made.questions.append(
        Question(range(first, len(made.tokens)), needle, len(made.tokens) - 3, starts[-1] + 4, starts[0] / made.length)
    )


def _ask_passage(
    documents: Documents,
    rng: np.random.Generator,
    made: Conversation,
    passages: list[tuple[int, np.ndarray]],
    low: float,
    high: float,
) -> None:
    """Quotes a line that occurs once in the document and asks for its continuation."""
    writer = documents.writer
    said: dict[bytes, int] = {}
    for _, line in passages:
        said[line.tobytes()] = said.get(line.tobytes(), 0) + 1
    fits = [(at, line) for at, line in passages if at + len(line) + PASSAGE <= made.length]
    usable = [(at, line) for at, line in fits if len(line) >= 7 and said[line.tobytes()] == 1]
    inside = [p for p in usable if low <= p[0] / made.length < high] or usable
    at, line = inside[int(rng.integers(len(inside)))]
    made.tokens += [writer.continue_, writer.colon, *map(int, line), writer.assistant]
    first, source = len(made.tokens), at + len(line)
    made.tokens += made.tokens[source : source + PASSAGE]
    answer = range(first, len(made.tokens))
    made.tokens.append(writer.eos)
    needle = tuple(range(source, source + PASSAGE))
    made.questions.append(Question(answer, needle, answer[-1] - 1, needle[-1], at / made.length))
