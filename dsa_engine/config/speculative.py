"""The options of speculative decoding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dsa_engine.config.checks import integer, number
from dsa_engine.config.fields import BOOL, Kind, Options, choice, documented, option

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
    use_mtp_vanilla: bool | None = option(
        BOOL,
        None,
        "True: each MTP module drafts one token, the first the token behind the next one; False: the first module "
        "drafts all. Default: True where the checkpoint has several modules. TensorRT-LLM's name.",
    )
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

    def modules(self, there: int) -> int:
        """How many MTP modules are used of a checkpoint that has ``there``: in vanilla mode one for each draft.

        Raises:
            ValueError: it has too few.
        """
        vanilla = there > 1 if self.use_mtp_vanilla is None else self.use_mtp_vanilla
        used = self.num_speculative_tokens if vanilla else 1
        if there == 0:
            raise ValueError(
                "speculative_config: the model has no MTP module to draft with (num_nextn_predict_layers is 0); take a "
                "checkpoint that has one, or no speculative_config"
            )
        if used > there:
            raise ValueError(
                f"speculative_config: with a module for each draft, {used} drafts take {used} MTP modules, the model "
                f"has {there} (num_nextn_predict_layers); ask for at most {there} num_speculative_tokens, or let the "
                "first module make all drafts with use_mtp_vanilla=False"
            )
        return used
