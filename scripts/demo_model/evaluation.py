"""Retrieval by the demo model.

A case is a document with scattered facts, and a question. The questions of a document follow each other in
one conversation, each with its right answer, so a single prefill answers all of them: the greedy answer is, token by
token, the argmax at the previous position. Facts are spread evenly; the text between them is held out.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from demo_model.corpus import documents_of, standard_library
from demo_model.data import Documents, draw_facts
from dsa_engine.llm import LLM

SEED = 1000
SPACING = 64  # tokens of a document per fact


class Examination(NamedTuple):
    """A document followed by its questions; ``answers`` are positions of answers, ``depths`` those of their facts,
    0 to 1."""

    tokens: list[int]
    answers: list[range]
    depths: list[float]


def held_out() -> Documents:
    """Text that the shipped model was not trained on."""
    return documents_of(standard_library()[1])


def conversation(documents: Documents, length: int, seed: int, questions: int = 10) -> Examination:
    """A document of exactly ``length`` tokens and a question for a fact in each of ``questions`` parts of it, in random
    order; the same arguments give the same tokens.

    Raises:
        ValueError: the document is too short for so many questions.
    """
    count = length // SPACING
    if count < questions:
        raise ValueError(f"a document of {length} tokens has {count} facts: too few for {questions} questions")
    rng = np.random.default_rng([seed, length, 0])
    writer = documents.writer
    tokens = [writer.bos, writer.user]
    facts, starts = draw_facts(rng, count), []
    for i, fact in enumerate(facts):
        _fill(documents, rng, tokens, int((i + 0.5) * length / count) - 6)
        starts.append(len(tokens))
        tokens += writer.fact(*fact)[0]
    _fill(documents, rng, tokens, length)
    made = Examination(tokens, [], [])
    for i, part in enumerate(rng.permutation(questions)):
        inside = [j for j, start in enumerate(starts) if part <= start / length * questions < part + 1]
        asked = int(rng.choice(inside))
        tokens += [*[writer.user] * (i > 0), *writer.question([facts[asked][0]]), writer.assistant]
        answer = writer.answer([facts[asked]])
        made.answers.append(range(len(tokens), len(tokens) + len(answer)))
        made.depths.append(starts[asked] / length)
        tokens += answer
    return made


def _fill(documents: Documents, rng: np.random.Generator, tokens: list[int], until: int) -> None:
    """Adds lines of text up to exactly ``until`` tokens; the last line is cut and keeps its line break."""
    while len(tokens) < until:
        for line in documents.library.passage(rng, until - len(tokens)):
            room = until - len(tokens)
            if room:
                tokens += [*map(int, line[: room - 1]), int(line[-1])] if len(line) > room else map(int, line)


def retrieval(llm: LLM, documents: Documents, length: int, count: int) -> list[tuple[float, bool]]:
    """Asks ``count`` questions, ten per document: for each the depth of its fact, 0 to 1, and whether every token of
    the greedy answer is right."""
    cases: list[tuple[float, bool]] = []
    while len(cases) < count:
        talk = conversation(documents, length, SEED + len(cases), min(10, count - len(cases)))
        greedy = llm.prompt_logits(talk.tokens).argmax(dim=-1).tolist()
        for depth, answer in zip(talk.depths, talk.answers, strict=True):
            cases.append((depth, all(greedy[i - 1] == talk.tokens[i] for i in answer)))
    return cases
