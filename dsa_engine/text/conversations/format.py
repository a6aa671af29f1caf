"""The form of a model's conversations: which prompt they make, and how its answers are read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsa_engine.text.chat_template import conversations, render
from dsa_engine.text.conversations.reader import MessageReader
from dsa_engine.text.tokenizer import Tokenizer


def conversation_format(
    folder: Path | str,
    config_or_model_type: Any,
    *,
    reasoning_parser: str | None = None,
    tool_call_parser: str | None = None,
    tokenizer: Tokenizer | None = None,
) -> ConversationFormat:
    """The form of the conversations of a model.

    Args:
        folder: the model's folder.
        config_or_model_type: the ``ModelConfig``, or its ``model_type``.
        reasoning_parser: the form of thoughts, by vLLM's name, or "none"; default: the folder's own.
        tool_call_parser: the form of tool calls, by vLLM's name, or "none"; default: the folder's own.
        tokenizer: the folder's tokenizer, if it is loaded already.

    Raises:
        ValueError: there is no parser of that name, or the folder has no tokenizer.
    """
    return ConversationFormat(Path(folder), tokenizer or Tokenizer(Path(folder)))


@dataclass(frozen=True)
class ConversationFormat:
    """The form of a model's conversations; made by :func:`conversation_format`."""

    folder: Path
    tokenizer: Tokenizer
    needs_special_tokens: bool = False  # readers need the text with its special tokens (skip_special_tokens=False)

    def render(
        self,
        messages: Any,
        *,
        tools: Sequence[Any] | None = None,
        tool_choice: Any = None,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        response_format: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt of one conversation, special tokens included: encode it with ``add_special_tokens=False``."""
        (conversation,) = conversations(messages)
        return render(
            self.tokenizer.hf,
            conversation,
            str(self.folder),
            chat_template=chat_template,
            chat_template_kwargs=chat_template_kwargs,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
        )

    def reader(self, prompt_text: str, tools: Sequence[Any] | None = None) -> MessageReader:
        """A reader for one answer to the prompt. Without ``tools``, tool calls are content."""
        return MessageReader()
