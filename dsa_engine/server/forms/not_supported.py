"""Parameters of OpenAI's and vLLM's APIs that do not exist here: what to do instead, or that they change nothing."""

from __future__ import annotations

from typing import Any

from dsa_engine.vllm_options import sampling_answer

_NO_GRAMMAR = (
    "output is not constrained by a grammar; say the form in the prompt, or use allowed_token_ids, bad_words or "
    "logit_bias"
)
_NO_MEDIA = "the model reads and writes text only"
_TOOLS = "give tools, and tool_choice 'auto' or 'none'"

# name: (what to do instead, the values that ask for what is done anyway)
_ANSWERS: dict[str, tuple[str, tuple[Any, ...]]] = {
    "response_format": (_NO_GRAMMAR, ({"type": "text"},)),
    "structured_outputs": (_NO_GRAMMAR, ({},)),
    "guided_json": (_NO_GRAMMAR, ()),
    "guided_regex": (_NO_GRAMMAR, ()),
    "guided_choice": (_NO_GRAMMAR, ()),
    "guided_grammar": (_NO_GRAMMAR, ()),
    "suffix": ("text is only continued; put what comes before into the prompt", ("",)),
    "best_of": ("use n with logprobs, and choose", (1,)),
    "use_beam_search": ("there is no beam search; use n with logprobs, and choose", (False,)),
    "functions": (_TOOLS, ([],)),
    "function_call": (_TOOLS, ("auto", "none")),
    "modalities": (_NO_MEDIA, (["text"],)),
    "audio": (_NO_MEDIA, ()),
    "mm_processor_kwargs": (_NO_MEDIA, ({},)),
    "web_search_options": ("there is no search; put what the model should know into the messages", ()),
    "prediction": ("predicted outputs do not exist here; leave it out", ()),
    "reasoning_effort": ('thoughts are chosen by chat_template_kwargs, such as {"thinking": true}', ()),
    "documents": ("put the documents into the messages", ([],)),
    "prompt_embeds": ("give the prompt as a text or token ids", ()),
    "truncate_prompt_tokens": ("cut the prompt before you send it", (-1,)),
    "priority": ("requests are served in order of arrival", (0,)),
    "kv_transfer_params": ("caches are not sent between servers", ({},)),
    "return_tokens_as_token_ids": ("use return_token_ids", (False,)),
    "logits_processors": ("use logit_bias, bad_words or allowed_token_ids", ([],)),
}
# Parameters for accounts, bills and routing at a provider; they never change an output here.
_WITHOUT_EFFECT = {
    "metadata",
    "prompt_cache_key",
    "prompt_cache_retention",
    "request_id",
    "safety_identifier",
    "service_tier",
    "store",
    "user",
    "verbosity",
}


def advice(name: str, value: Any) -> str | None:
    """What to do instead of a parameter; "" if it can be ignored; None if it is unknown."""
    if name in _WITHOUT_EFFECT:
        return ""
    if name in _ANSWERS:
        text, neutral = _ANSWERS[name]
        return "" if any(type(value) is type(one) and value == one for one in neutral) else text
    return sampling_answer(name, value)
