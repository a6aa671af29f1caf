"""The load of the serving benchmark: conversations and the times at which they begin, the same for the same seed.

Names, options and defaults of the datasets are the field's: ``random`` and ``prefix_repetition`` are those of ``vllm
bench serve``, ``generated-shared-prefix`` is that of ``sglang.bench_serving``, whose ``--gsp-num-turns`` makes
conversations. As a server's tokenizer is not at hand, prompts are random words: common short ones, which are one token
in most vocabularies.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

_TEXT = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part case week company system program question work government number night point home water room mother area "
    "money story fact month lot right study book eye job word business issue side kind head house service friend "
    "father power hour game line end member law car city community name president team minute idea body information "
    "back parent face level office door health person art war history party result change morning reason research "
    "girl guy moment air teacher force education foot boy age policy music market sense nation plan college interest "
    "death experience effect use class control care field development role effort rate heart drug show leader light "
    "voice wife"
)
WORDS = tuple(_TEXT.split())


class Turn(NamedTuple):
    """A request of a conversation: the number of tokens that it adds to the prompt, and that of its output."""

    added: int
    output: int


class Shape(NamedTuple):
    """The lengths of a conversation; a request alone is a conversation of one turn.

    Its prompts begin with ``prefix_len`` tokens that all conversations with the same ``prefix`` have in common.
    """

    turns: list[Turn]
    prefix: int = 0
    prefix_len: int = 0


class Conversation(NamedTuple):
    """The texts that the requests add to the prompt, that is to all text before, answers included; and the number of
    tokens of each answer."""

    questions: list[str]
    output_lens: list[int]


def add_load_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options that the functions of this file read."""
    parser.add_argument("--request-rate", type=_positive, default=math.inf, help="arrivals a second; inf: all at once")
    parser.add_argument("--burstiness", type=_positive, default=1.0, help="1: Poisson; less: bursts; more: evenly")
    parser.add_argument("--seed", type=int, default=0, help="of lengths, words and arrivals")
    group = parser.add_argument_group("what is sent")
    group.add_argument(
        "--dataset-name",
        choices=("random", "prefix_repetition", "generated-shared-prefix"),
        default="random",
        help="random (default): prompts with nothing in common; prefix_repetition: each begins with one of a few "
        "prefixes; generated-shared-prefix: conversations, in groups that have a system prompt in common",
    )
    for flag, default, about in (
        ("--num-prompts", 100, "requests of random and of prefix_repetition"),
        ("--random-input-len", 1024, "tokens of a prompt"),
        ("--random-output-len", 128, "tokens of an output"),
        ("--prefix-repetition-prefix-len", 256, "tokens of a prefix"),
        ("--prefix-repetition-suffix-len", 256, "tokens of a prompt after its prefix"),
        ("--prefix-repetition-num-prefixes", 10, "number of prefixes"),
        ("--prefix-repetition-output-len", 128, "tokens of an output"),
        ("--gsp-num-groups", 64, "number of system prompts"),
        ("--gsp-prompts-per-group", 16, "conversations that begin with each"),
        ("--gsp-system-prompt-len", 2048, "tokens of a system prompt"),
        ("--gsp-question-len", 128, "tokens of a question"),
        ("--gsp-output-len", 256, "tokens of an output"),
        ("--gsp-num-turns", 1, "questions of a conversation"),
    ):
        group.add_argument(flag, type=at_least_1, default=default, metavar="N", help=about)
    group.add_argument(
        "--random-range-ratio", type=_fraction, default=0.0, help="lengths of random vary by this fraction, both ways"
    )


def _number(kind: type, allowed: str, holds: Callable[[Any], bool]) -> Callable[[str], Any]:
    """The type of an option that has a number."""

    def read(text: str) -> Any:
        with suppress(ValueError):
            if holds(value := kind(text)):
                return value
        raise argparse.ArgumentTypeError(f"must be {allowed}, not {text}")

    return read


at_least_1 = _number(int, "at least 1", lambda value: value >= 1)
_positive = _number(float, "above 0", lambda value: value > 0)
_fraction = _number(float, "at least 0 and below 1", lambda value: 0 <= value < 1)


def shapes(args: argparse.Namespace) -> list[Shape]:
    """The lengths of the conversations, in order of arrival."""
    if args.dataset_name == "random":
        rng = random.Random(f"lengths {args.seed}")

        def draw(mean: int) -> int:
            low = max(1, math.floor(mean * (1 - args.random_range_ratio)))
            return rng.randint(low, max(low, math.ceil(mean * (1 + args.random_range_ratio))))

        lengths = [Turn(draw(args.random_input_len), draw(args.random_output_len)) for _ in range(args.num_prompts)]
        return [Shape([turn]) for turn in lengths]
    if args.dataset_name == "prefix_repetition":
        turns = [Turn(args.prefix_repetition_suffix_len, args.prefix_repetition_output_len)]
        prefixes = [number % args.prefix_repetition_num_prefixes for number in range(args.num_prompts)]
        prefix_len = args.prefix_repetition_prefix_len
    else:
        turns = [Turn(args.gsp_question_len, args.gsp_output_len)] * args.gsp_num_turns
        prefixes = [group for group in range(args.gsp_num_groups) for _ in range(args.gsp_prompts_per_group)]
        prefix_len = args.gsp_system_prompt_len
    random.Random(f"order {args.seed}").shuffle(prefixes)
    return [Shape(turns, prefix, prefix_len) for prefix in prefixes]


def conversations(args: argparse.Namespace, words_per_token: float) -> list[Conversation]:
    """The texts of all conversations, in order of arrival."""

    def draw(rng: random.Random, tokens: int) -> str:
        return " ".join(rng.choices(WORDS, k=max(1, round(tokens * words_per_token))))

    rng = random.Random(f"words {args.seed}")
    result = []
    for shape in shapes(args):
        questions = [draw(rng, turn.added) for turn in shape.turns]
        if shape.prefix_len:
            prefix = draw(random.Random(f"prefix {args.seed} {shape.prefix}"), shape.prefix_len)
            questions[0] = f"{prefix} {questions[0]}"
        result.append(Conversation(questions, [turn.output for turn in shape.turns]))
    return result


def warmup(args: argparse.Namespace, words_per_token: float) -> Conversation:
    """A request of other words, as long as the first one."""
    first = conversations(args, words_per_token)[0]
    words = random.Random(f"warmup {args.seed}").choices(WORDS, k=len(first.questions[0].split()))
    return Conversation([" ".join(words)], first.output_lens[:1])


def arrivals(args: argparse.Namespace, count: int) -> list[float]:
    """Seconds after the start at which each of ``count`` conversations begins, ascending; the first is 0. Gaps follow a
    gamma distribution."""
    if math.isinf(args.request_rate):
        return [0.0] * count
    rng = random.Random(f"arrivals {args.seed}")
    times = [0.0]
    while len(times) < count:
        times.append(times[-1] + rng.gammavariate(args.burstiness, 1 / (args.request_rate * args.burstiness)))
    return times
