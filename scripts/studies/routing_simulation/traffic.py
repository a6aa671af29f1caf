"""Seeded traffic: conversations that begin as a Poisson process, some of them about a shared document.

A conversation has a system prompt, perhaps a document, and turns. The next turn comes after the answer and a time to
think, with everything so far as its prefix. A conversation's content does not depend on the rule under test; the times
of its later turns do, as with real users.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate
from random import Random

BLOCK_TOKENS = 256


@dataclass(frozen=True)
class Turn:
    """A request: tokens of its prompt and output, seconds after the answer before, and its digests."""

    prompt_tokens: int
    output_tokens: int
    think_s: float
    blocks: tuple[bytes, ...]  # the prompt's
    blocks_after: tuple[bytes, ...]  # of prompt and output


@dataclass(frozen=True)
class Conversation:
    """Its first request comes at ``start_s``, each further one after the answer before it."""

    start_s: float
    turns: tuple[Turn, ...]


@dataclass(frozen=True)
class Traffic:
    """What conversations are like; lengths are drawn evenly on a logarithmic scale, between these tokens.

    Attributes:
        rate: conversations that begin a second.
        duration_s: seconds in which conversations begin.
        documents: number of documents; the first ones are asked about more often.
        about_document: fraction of conversations about a document.
        single: fraction of conversations of one long or short prompt that has no prefix in common with any other.
    """

    rate: float
    duration_s: float
    seed: int = 0
    documents: int = 200
    about_document: float = 0.3
    single: float = 0.3
    document_tokens: tuple[int, int] = (4096, 120_000)
    single_tokens: tuple[int, int] = (100, 131_072)
    message_tokens: tuple[int, int] = (20, 2000)
    output_tokens: tuple[int, int] = (20, 1000)
    system_tokens: tuple[int, ...] = (300, 1200, 5000)
    max_turns: int = 10
    think_s: float = 15.0
    max_prompt_tokens: int = 131_072

    def conversations(self) -> list[Conversation]:
        """All of them, in order of their beginning."""
        random = Random(self.seed)
        lengths = [_length(random, self.document_tokens) for _ in range(self.documents)]
        weights = list(accumulate(1 / (i + 1) for i in range(self.documents)))
        made: list[Conversation] = []
        now = 0.0
        while (now := now + random.expovariate(self.rate)) < self.duration_s:
            made.append(self._conversation(random, now, len(made), lengths, weights))
        return made

    def _conversation(
        self, random: Random, start_s: float, number: int, lengths: list[int], weights: list[float]
    ) -> Conversation:
        if random.random() < self.single:
            parts = [(f"single {number}", _length(random, self.single_tokens))]
            num_turns = 1
        else:
            system = random.randrange(len(self.system_tokens))
            parts = [(f"system {system}", self.system_tokens[system])]
            if random.random() < self.about_document:
                document = random.choices(range(self.documents), cum_weights=weights)[0]
                parts.append((f"document {document} after system {system}", lengths[document]))
            num_turns = random.randint(1, self.max_turns)
        turns = []
        for i in range(num_turns):
            if i or len(parts) > 1 or not parts[0][0].startswith("single"):
                parts.append((f"message {i} of {number}", _length(random, self.message_tokens)))
            prompt_tokens = sum(tokens for _, tokens in parts)
            if prompt_tokens > self.max_prompt_tokens:
                break
            blocks = _blocks(parts)
            output_tokens = _length(random, self.output_tokens)
            parts.append((f"answer {i} of {number}", output_tokens))
            think_s = random.expovariate(1 / self.think_s)
            turns.append(Turn(prompt_tokens, output_tokens, think_s, blocks, _blocks(parts)))
        return Conversation(start_s, tuple(turns))


def _length(random: Random, limits: tuple[int, int]) -> int:
    return round(math.exp(random.uniform(*map(math.log, limits))))


def _blocks(parts: list[tuple[str, int]]) -> tuple[bytes, ...]:
    """Names of the full blocks: the part in which a block ends, and where. Parts before follow from the part's name."""
    names: list[bytes] = []
    offset = 0
    for name, tokens in parts:
        last = (offset + tokens) // BLOCK_TOKENS
        names += [f"{name}: {block}".encode() for block in range(len(names), last)]
        offset += tokens
    return tuple(names)
