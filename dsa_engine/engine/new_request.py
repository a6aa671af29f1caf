"""A request as it is asked for: its parameters within what the model allows, and what makes text of its output."""

from __future__ import annotations

import time
from dataclasses import replace

from dsa_engine.engine.request import Request
from dsa_engine.engine.request_checks import check_prompt, check_token_ids
from dsa_engine.sampling_params import SamplingParams
from dsa_engine.tokenizer import TextStream, Tokenizer


def new_request(
    prompt: list[int], params: SamplingParams, tokenizer: Tokenizer | None, max_model_len: int, vocab_size: int
) -> Request:
    """A request that arrives now; its ``id`` is to be given when it is queued.

    Args:
        tokenizer: makes text of the output; None: nobody asks for it.

    Raises:
        ValueError: an empty prompt, token ids that the model does not have, or no room below ``max_model_len``.
    """
    check_prompt(prompt, 1, max_model_len, vocab_size)
    check_token_ids(params, vocab_size)
    room = max_model_len - len(prompt)
    if params.max_tokens is None or params.max_tokens > room:
        # As in vLLM: the model's length ends a request that asks for more.
        params = replace(params, max_tokens=room, min_tokens=min(params.min_tokens, room))
    text, bad_words = None, []
    if tokenizer and params.detokenize:
        how = (params.include_stop_str_in_output, params.skip_special_tokens)
        text = TextStream(tokenizer, params.stop_strings, params.min_tokens, *how)
    if tokenizer:
        bad_words = [ids for word in params.bad_words or () for ids in tokenizer.word_ids(word)]
    return Request(-1, prompt, params, time.perf_counter(), text, bad_words)
