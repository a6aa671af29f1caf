"""The options of speculative decoding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from dsa_engine.parallel.option_fields import Kind, Options, choice, documented, option

MOST_DRAFTS = 7

Method = Literal["mtp"]


def _check_drafts(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MOST_DRAFTS:
        raise ValueError(f"{name} must be an integer from 1 to {MOST_DRAFTS}, not {value!r}")


@documented
@dataclass(frozen=True)
class SpeculativeConfig(Options):
    """How tokens are drafted and accepted (``LLM(speculative_config={…})``).

    Raises:
        TypeError, ValueError: an option is not known or not possible; the text says what is.
    """

    method: Method = option(choice(Method), "mtp", '"mtp": the checkpoint\'s Multi-Token Prediction module drafts.')
    num_speculative_tokens: int = option(Kind(_check_drafts, int), 1, f"drafts a step, 1 to {MOST_DRAFTS}.")

    @property
    def modules(self) -> int:
        """How many MTP modules are used."""
        return 1
