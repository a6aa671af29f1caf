"""``/tokenize`` and ``/detokenize``, in vLLM's form."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dsa_engine.config.checks import integer, list_of
from dsa_engine.config.fields import BOOL, JSON_OBJECT, STR, Kind, documented, instance_of, option
from dsa_engine.server.forms.parameters import RequestParameters
from dsa_engine.server.remote.client import EngineClient
from dsa_engine.text.conversations import ConversationFormat


@documented
@dataclass
class TokenizeParameters(RequestParameters):
    """The parameters of ``/tokenize``: a text, or a conversation."""

    samples = False

    prompt: str | None = option(STR, None, "the text.")
    messages: Any = option(Kind(list_of(instance_of(dict), "messages")), list, "the conversation.")
    model: str | None = option(STR, None, "the model's name.")
    add_special_tokens: bool | None = option(BOOL, None, "begin the tokens as every text begins; default: of a text.")
    return_token_strs: bool = option(BOOL, False, "return the text of each token too.")
    tools: Any = option(Kind(list_of(instance_of(dict), "tools")), list, "functions that the model may call.")
    chat_template: str | None = option(STR, None, "a template to use instead of the model's.")
    chat_template_kwargs: dict[str, Any] = option(JSON_OBJECT, dict, "further variables of the template.")
    add_generation_prompt: bool = option(BOOL, True, "end the prompt where the answer begins.")
    continue_final_message: bool = option(BOOL, False, "go on with the last message.")


@documented
@dataclass
class DetokenizeParameters(RequestParameters):
    """The parameters of ``/detokenize``."""

    samples = False

    tokens: Any = option(Kind(list_of(integer(0, 2**31 - 1), "token ids")), list, "token ids.")
    model: str | None = option(STR, None, "the model's name.")


def tokenize(
    llm: EngineClient, conversation: ConversationFormat | None, body: dict[str, Any], chat_template: str | None
) -> dict[str, Any]:
    """The token ids of a text or of a conversation; raises ``ValueError`` or ``TypeError``."""
    asked, _ = TokenizeParameters.parse(body)
    if (asked.prompt is None) == (not asked.messages):
        raise ValueError("give prompt, a text, or messages, a conversation")
    if asked.prompt is not None:
        special = True if asked.add_special_tokens is None else asked.add_special_tokens
        ids = llm.tokenizer.encode(asked.prompt, add_special_tokens=special)
    elif conversation is None:
        raise ValueError("messages need a tokenizer, and the model's folder has none")
    else:
        text = conversation.render(
            asked.messages,
            tools=asked.tools or None,
            chat_template=asked.chat_template or chat_template,
            chat_template_kwargs=asked.chat_template_kwargs or None,
            add_generation_prompt=asked.add_generation_prompt and not asked.continue_final_message,
            continue_final_message=asked.continue_final_message,
        )
        ids = llm.tokenizer.encode(text, add_special_tokens=bool(asked.add_special_tokens))
    texts = [llm.tokenizer.token_text(token) for token in ids] if asked.return_token_strs else None
    return {"count": len(ids), "max_model_len": llm.facts.max_model_len, "tokens": ids, "token_strs": texts}


def detokenize(llm: EngineClient, body: dict[str, Any]) -> dict[str, Any]:
    """The text of token ids; raises ``ValueError`` or ``TypeError``."""
    tokens = DetokenizeParameters.parse(body)[0].tokens
    vocab = llm.facts.config.vocab_size
    if tokens and max(tokens) >= vocab:
        raise ValueError(f"tokens has {max(tokens)}; the vocabulary has ids 0 … {vocab - 1}")
    return {"prompt": llm.tokenizer.decode(tokens, skip_special_tokens=False)}
