"""The prompts of the serving benchmark: their lengths, and what they have in common.

Names, options and defaults are the field's: ``random`` and ``prefix_repetition`` are those of ``vllm bench serve``,
``generated-shared-prefix`` is that of ``sglang.bench_serving``, whose ``--gsp-num-turns`` makes conversations. (vLLM's
conversations are a script apart with a JSON file of distributions.)
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, fields
from typing import ClassVar, NamedTuple


class Turn(NamedTuple):
    """A request of a conversation: the number of tokens that it adds to the prompt, and that of its output."""

    added: int
    output: int


@dataclass(frozen=True)
class Shape:
    """The lengths of a conversation; a request alone is a conversation of one turn.

    Its prompts begin with ``prefix_len`` tokens that all conversations with the same ``prefix`` have in common.
    """

    turns: list[Turn]
    prefix: int = 0
    prefix_len: int = 0


@dataclass(frozen=True)
class Dataset:
    """Numbers and lengths, each at least 1.

    Attributes:
        name: the word for ``--dataset-name``.
        option: the beginning of its options; the rest is the name of the field.
        common_prefixes: whether prompts begin alike.

    Raises:
        ValueError: a value is out of range; the text names the option.
    """

    name: ClassVar[str]
    option: ClassVar[str]
    common_prefixes: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name != "range_ratio" and value < 1:
                raise ValueError(f"{self.flag(f.name)} must be at least 1, not {value}")

    @classmethod
    def flag(cls, name: str) -> str:
        """The option of a field: ``--random-input-len`` of "input_len"."""
        beginning = "" if name == "num_prompts" else f"{cls.option}-"
        return f"--{beginning}{name.replace('_', '-')}"

    def shapes(self, seed: int) -> list[Shape]:
        """The conversations in order of arrival, the same for the same seed."""
        raise NotImplementedError


@dataclass(frozen=True)
class RandomPrompts(Dataset):
    """Requests that have nothing in common.

    Attributes:
        num_prompts: number of requests.
        input_len, output_len: tokens of a request, on average.
        range_ratio: lengths are drawn evenly from ``len * (1 ± range_ratio)``; 0 ≤ range_ratio < 1.
    """

    name = "random"
    option = "random"
    common_prefixes = False

    num_prompts: int = 100
    input_len: int = 1024
    output_len: int = 128
    range_ratio: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.range_ratio < 1:
            raise ValueError(f"{self.flag('range_ratio')} must be at least 0 and below 1, not {self.range_ratio}")

    def shapes(self, seed: int) -> list[Shape]:
        rng = random.Random(f"lengths {seed}")

        def draw(mean: int) -> int:
            low = max(1, math.floor(mean * (1 - self.range_ratio)))
            return rng.randint(low, max(low, math.ceil(mean * (1 + self.range_ratio))))

        return [Shape([Turn(draw(self.input_len), draw(self.output_len))]) for _ in range(self.num_prompts)]


@dataclass(frozen=True)
class PrefixRepetition(Dataset):
    """Requests about a few documents: each of ``num_prefixes`` is the beginning of as many prompts, in random order.

    Attributes:
        num_prompts: number of requests, at least ``num_prefixes``.
        prefix_len, suffix_len: tokens of a prompt that others have too, and its own tokens after them.
    """

    name = "prefix_repetition"
    option = "prefix-repetition"

    num_prompts: int = 100
    prefix_len: int = 256
    suffix_len: int = 256
    num_prefixes: int = 10
    output_len: int = 128

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_prompts < self.num_prefixes:
            raise ValueError(
                f"{self.flag('num_prompts')} {self.num_prompts} is less than {self.flag('num_prefixes')} "
                f"{self.num_prefixes}: no prefix would come twice; send more requests or use fewer prefixes"
            )

    def shapes(self, seed: int) -> list[Shape]:
        turns = [Turn(self.suffix_len, self.output_len)]
        shapes = [Shape(turns, number % self.num_prefixes, self.prefix_len) for number in range(self.num_prompts)]
        random.Random(f"order {seed}").shuffle(shapes)
        return shapes


@dataclass(frozen=True)
class GeneratedSharedPrefix(Dataset):
    """Conversations: those of a group have the system prompt in common, each turn asks a question after all before.

    Attributes:
        num_groups, prompts_per_group: number of system prompts, and of conversations that begin with each.
        system_prompt_len, question_len, output_len: tokens.
        num_turns: number of requests of a conversation.
    """

    name = "generated-shared-prefix"
    option = "gsp"

    num_groups: int = 64
    prompts_per_group: int = 16
    system_prompt_len: int = 2048
    question_len: int = 128
    output_len: int = 256
    num_turns: int = 1

    def shapes(self, seed: int) -> list[Shape]:
        turns = [Turn(self.question_len, self.output_len)] * self.num_turns
        groups = [group for group in range(self.num_groups) for _ in range(self.prompts_per_group)]
        random.Random(f"order {seed}").shuffle(groups)
        return [Shape(turns, group, self.system_prompt_len) for group in groups]


DATASETS: dict[str, type[Dataset]] = {one.name: one for one in (RandomPrompts, PrefixRepetition, GeneratedSharedPrefix)}
