"""What a request may not ask for, said before it is queued."""

from __future__ import annotations

from collections.abc import Sequence

from dsa_engine.sampling_params import SamplingParams


def check_prompt(prompt: Sequence[int], room: int, max_model_len: int, vocab_size: int) -> None:
    """``ValueError`` for a prompt that is empty, has ids that the model does not have, or leaves no ``room`` tokens."""
    if not prompt:
        raise ValueError("the prompt is empty; give at least one token")
    if len(prompt) + room > max_model_len:
        raise ValueError(
            f"the prompt has {len(prompt)} tokens, max_model_len is {max_model_len}"
            + (f", of which at least {room} must be left for the output" if room else "")
            + "; shorten the prompt or raise max_model_len"
        )
    lowest, highest = min(prompt), max(prompt)
    if lowest < 0 or highest >= vocab_size:
        wrong = lowest if lowest < 0 else highest
        raise ValueError(f"token id {wrong} is out of range; the vocabulary has ids 0 … {vocab_size - 1}")


def check_token_ids(params: SamplingParams, vocab_size: int) -> None:
    """``ValueError`` where the parameters allow or favour tokens that the model does not have."""
    for name in ("allowed_token_ids", "logit_bias"):
        for token in getattr(params, name) or ():
            if token >= vocab_size:
                raise ValueError(f"{name} has token id {token}; the vocabulary has ids 0 … {vocab_size - 1}")
