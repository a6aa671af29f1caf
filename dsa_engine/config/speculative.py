"""The options of speculative decoding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from dsa_engine.config.checks import TokenId, at_least
from dsa_engine.config.fields import Options, documented, option

MAX_DRAFTS = 7

Method = Literal["mtp", "deepseek_mtp"]  # the second is vLLM's word for the first


@documented
@dataclass(frozen=True)
class SpeculativeConfig(Options):
    """How tokens are drafted and accepted (``LLM(speculative_config={…})``)."""

    method: Method = option(
        "mtp",
        '"mtp", in vLLM also "deepseek_mtp": the checkpoint\'s Multi-Token Prediction module drafts.',
    )
    num_speculative_tokens: Annotated[int, at_least(1, MAX_DRAFTS)] = option(1, f"drafts a step, 1 to {MAX_DRAFTS}.")
    use_mtp_vanilla: bool | None = option(
        None,
        "True: each MTP module drafts one token, the first module the token after the next one; False: the first "
        "module drafts all. Default: True where the checkpoint has several modules. TensorRT-LLM's name.",
    )
    relaxed_topk: Annotated[int, at_least(0)] = option(
        0,
        "while the model thinks, also accept a draft that is among this many most likely tokens: this changes "
        "outputs. 0: never.",
    )
    relaxed_delta: Annotated[float, at_least(0, 1)] = option(
        0.0,
        "accept such a draft only if its probability is at least that of the most likely token minus this.",
    )
    begin_thinking_token: TokenId | None = option(
        None, "the token after which a model thinks; default: the tokenizer's <think>."
    )
    end_thinking_token: TokenId | None = option(
        None, "the token that ends the thinking; default: the tokenizer's </think>."
    )

    @classmethod
    def answer(cls, name: str, value: Any) -> str | None:
        return "drafts come from the checkpoint's own MTP module" if name == "model" else None

    def modules(self, available: int) -> int:
        """The number of MTP modules to use of a checkpoint that has ``available``: one per draft in vanilla mode."""
        vanilla = available > 1 if self.use_mtp_vanilla is None else self.use_mtp_vanilla
        used = self.num_speculative_tokens if vanilla else 1
        if available == 0:
            raise ValueError(
                "speculative_config: the model has no MTP module to draft with (num_nextn_predict_layers is 0); take a "
                "checkpoint that has one, or no speculative_config"
            )
        if used > available:
            raise ValueError(
                f"speculative_config: with a module for each draft, {used} drafts take {used} MTP modules, the model "
                f"has {available} (num_nextn_predict_layers); ask for at most {available} num_speculative_tokens, or "
                "let the first module make all drafts with use_mtp_vanilla=False"
            )
        return used
