"""The load of the serving benchmark: conversations and the times at which they begin, the same for the same seed."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

from dsa_engine.commands.bench.serving.datasets import Dataset, RandomPrompts
from dsa_engine.config.checks import is_number


@dataclass(frozen=True)
class Conversation:
    """Requests of which each follows the answer to the one before; most loads have one request in each.

    Attributes:
        questions: token ids that each request adds to the prompt, that is to all tokens before, answers included.
        output_lens: number of tokens of each answer.
    """

    questions: list[list[int]]
    output_lens: list[int]


@dataclass(frozen=True)
class ServingLoad:
    """What is sent, and when.

    Attributes:
        dataset: lengths and common beginnings of the prompts.
        request_rate: mean number of conversations that begin per second; ``inf``: all at once. A turn after the first
            is sent as soon as the turn before has been answered.
        burstiness: shape of the gamma distribution of the gaps: 1 is a Poisson process, below 1 is burstier,
            above 1 is more even.
        max_concurrency: maximum number of requests at once; other conversations wait. None: no limit.
        ignore_eos: whether every output has its full length.
        seed: seed of lengths, tokens and arrivals.

    Raises:
        ValueError: a value is out of range; the text says what is allowed.
    """

    dataset: Dataset = field(default_factory=RandomPrompts)
    request_rate: float = math.inf
    burstiness: float = 1.0
    max_concurrency: int | None = None
    ignore_eos: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        if self.max_concurrency is not None and self.max_concurrency < 1:
            raise ValueError(f"--max-concurrency must be at least 1, not {self.max_concurrency}")
        for name in ("request_rate", "burstiness"):
            value = getattr(self, name)
            at_once = name == "request_rate" and value == math.inf
            if not (at_once or (is_number(value) and value > 0)):
                raise ValueError(f"--{name.replace('_', '-')} must be a number above 0, not {value}")

    def arrivals(self) -> list[float]:
        """Seconds after the start at which each conversation begins, ascending; the first is 0."""
        rng = random.Random(f"arrivals {self.seed}")
        count = len(self.dataset.shapes(self.seed))
        if math.isinf(self.request_rate):
            return [0.0] * count
        at, times = 0.0, [0.0]
        while len(times) < count:
            at += rng.gammavariate(self.burstiness, 1 / (self.request_rate * self.burstiness))
            times.append(at)
        return times

    def lengths(self) -> list[list[tuple[int, int]]]:
        """(prompt, output) tokens of every request of every conversation, if no answer ends early."""
        lengths = []
        for shape in self.dataset.shapes(self.seed):
            prompt, requests = shape.prefix_len, []
            for turn in shape.turns:
                prompt += turn.added
                requests.append((prompt, turn.output))
                prompt += turn.output
            lengths.append(requests)
        return lengths

    def longest(self) -> tuple[int, int]:
        """(prompt, output) tokens of the longest request."""
        return max((request for requests in self.lengths() for request in requests), key=sum)

    def conversations(self, vocabulary: int, per_token: float = 1.0) -> list[Conversation]:
        """The tokens of all prompts.

        Args:
            vocabulary: ids are below it.
            per_token: number of ids for a token of the dataset: below 1 if each becomes a word of several tokens.
        """

        def draw(rng: random.Random, length: int) -> list[int]:
            return rng.choices(range(vocabulary), k=max(1, round(length * per_token)))

        rng = random.Random(f"tokens {self.seed}")
        prefixes: dict[int, list[int]] = {}
        conversations = []
        for shape in self.dataset.shapes(self.seed):
            questions = [draw(rng, turn.added) for turn in shape.turns]
            if shape.prefix_len:
                if shape.prefix not in prefixes:
                    prefixes[shape.prefix] = draw(random.Random(f"prefix {self.seed} {shape.prefix}"), shape.prefix_len)
                questions[0] = prefixes[shape.prefix] + questions[0]
            conversations.append(Conversation(questions, [turn.output for turn in shape.turns]))
        return conversations

    def warmup(self, vocabulary: int, per_token: float = 1.0) -> Conversation:
        """A first request of other tokens, as long as the dataset's first."""
        (prompt, output), *_ = self.lengths()[0]
        rng = random.Random(f"warmup {self.seed}")
        return Conversation([rng.choices(range(vocabulary), k=max(1, round(prompt * per_token)))], [output])
