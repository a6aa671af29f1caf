"""The options of speculative decoding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dsa_engine.parallel.option_fields import Kind, Options, choice, documented, option
from dsa_engine.parallel.value_checks import integer, number

MOST_DRAFTS = 7

Method = Literal["mtp"]


_TOKEN = Kind(integer(0), int)


@documented
@dataclass(frozen=True)
class SpeculativeConfig(Options):
    """How tokens are drafted and accepted (``LLM(speculative_config={…})``).

    Raises:
        TypeError, ValueError: an option is not known or not possible; the text says what is.
    """

    method: Method = option(choice(Method), "mtp", '"mtp": the checkpoint\'s Multi-Token Prediction module drafts.')
    num_speculative_tokens: int = option(Kind(integer(1, MOST_DRAFTS), int), 1, f"drafts a step, 1 to {MOST_DRAFTS}.")
    relaxed_topk: int = option(
        Kind(integer(0), int),
        0,
        "while the model thinks, also accept a draft that is among so many most likely tokens: this changes outputs. "
        "0: never.",
    )
    relaxed_delta: float = option(
        Kind(number(0, 1), float),
        0.0,
        "accept such a draft only if its probability is at least that of the most likely token less this.",
    )
    begin_thinking_token: int | None = option(
        _TOKEN, None, "the token behind which a model thinks; default: the tokenizer's <think>."
    )
    end_thinking_token: int | None = option(
        _TOKEN, None, "the token that ends its thinking; default: the tokenizer's </think>."
    )

    @property
    def modules(self) -> int:
        """How many MTP modules are used."""
        return 1
