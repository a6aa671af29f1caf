"""The form of a model's conversations: which prompt they make, and how its answers are read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dsa_engine.config.checks import check_text, shown
from dsa_engine.config.structured_outputs import StructuredOutputsParams
from dsa_engine.outputs import CompletionOutput, RequestOutput
from dsa_engine.text.chat_template import render, tool_schema
from dsa_engine.text.conversations import deepseek_v32
from dsa_engine.text.conversations.answer_grammar import GrammarWriter, after_thought
from dsa_engine.text.conversations.deltas import message_of
from dsa_engine.text.conversations.families import (
    REASONING_PARSERS,
    TOOL_CALL_PARSERS,
    reasoning_parser_of,
    tool_call_parser_of,
)
from dsa_engine.text.conversations.messages import conversations
from dsa_engine.text.conversations.reader import THINK, THINK_END, MessageReader, Thought
from dsa_engine.text.conversations.released_texts import FILE
from dsa_engine.text.conversations.tool_calls import CallForm, PlainCalls
from dsa_engine.text.tokenizer import Tokenizer

_BEGINNINGS = ("<｜Assistant｜>", "<|assistant|>")  # how templates begin an answer
_ENDS = ("<|user|>", "<|observation|>")  # with which GLM ends an answer, besides its end token


def conversation_format(
    folder: Path | str,
    config_or_model_type: Any,
    *,
    reasoning_parser: str | None = None,
    tool_call_parser: str | None = None,
    tokenizer: Tokenizer | None = None,
) -> ConversationFormat:
    """The form of the conversations of a model, given by its ``ModelConfig`` or ``model_type``.

    The parsers are the forms of thoughts and of tool calls, by vLLM's names, or "none"; default: those of the folder's
    template. ``tokenizer``: the folder's, if it is loaded already.
    """
    for name, given, parsers in (
        ("reasoning_parser", reasoning_parser, list(REASONING_PARSERS)),
        ("tool_call_parser", tool_call_parser, list(TOOL_CALL_PARSERS)),
    ):
        if given is not None and given not in parsers:
            raise ValueError(f"{name} must be one of {', '.join(parsers)}, not {shown(given)}")
    tokenizer = tokenizer or Tokenizer(Path(folder))
    template = _template_text(tokenizer)
    model_type = getattr(config_or_model_type, "model_type", config_or_model_type)
    own_form = not template and model_type == "deepseek_v32" and _has_v32_form(tokenizer)
    template = "".join(deepseek_v32.TOKENS) if own_form else template
    return ConversationFormat(
        tokenizer,
        own_form,
        REASONING_PARSERS[reasoning_parser or reasoning_parser_of(template)],
        TOOL_CALL_PARSERS[tool_call_parser or tool_call_parser_of(template)],
        _ENDS if all(token in template for token in _ENDS) else (),
    )


def _template_text(tokenizer: Tokenizer) -> str:
    given = tokenizer.hf.chat_template
    return "\n".join(map(str, given.values())) if isinstance(given, Mapping) else given or ""


def _has_v32_form(tokenizer: Tokenizer) -> bool:
    """Whether a folder without a template is DeepSeek-V3.2's: it has the released file, or a tokenizer with the
    form's special tokens."""
    ids = tokenizer.hf.convert_tokens_to_ids(list(deepseek_v32.TOKENS))
    return (tokenizer.folder / FILE).is_file() or not {None, tokenizer.hf.unk_token_id} & set(ids)


@dataclass(frozen=True)
class ConversationFormat:
    """The form of a model's conversations; made by :func:`conversation_format`."""

    tokenizer: Tokenizer
    own_form: bool = False  # prompts have DeepSeek-V3.2's own form, as the folder has no chat template
    thoughts: Thought = Thought.NONE  # how an answer begins, if its prompt does not say it; NONE: thoughts are content
    calls: CallForm | None = None  # the form of tool calls; None: they are content
    end_tokens: tuple[str, ...] = ()  # with which answers end, besides the tokenizer's own; they are in no message

    @property
    def needs_special_tokens(self) -> bool:
        """Whether a reader needs the text with its special tokens (``skip_special_tokens=False``)."""
        return self.thoughts is not Thought.NONE or self.calls is not None

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
        response_format: Any = None,
    ) -> str:
        """The prompt of one conversation, special tokens included: encode it with ``add_special_tokens=False``.

        Args:
            messages: ``[{"role": "user", "content": "…"}, …]``; a content may be a list of parts
                ``{"type": "text", "text": "…"}``.
            tools: functions that the model may call, in OpenAI's form.
            tool_choice: "none" for a prompt without tools; others: see :meth:`form_of`.
            chat_template: a Jinja template to use instead of the folder's form.
            chat_template_kwargs: further variables of the template; for DeepSeek-V3.2 see
                :func:`.deepseek_v32.render_v32`.
            add_generation_prompt: end the text where the assistant's answer begins.
            continue_final_message: leave the last message open, to be continued.
            response_format: the form of the answer, as OpenAI's API has it, or a JSON schema. The model is told of it
                in DeepSeek-V3.2's own form; templates have no words for it.
        """
        (conversation,) = conversations([messages])
        tools = None if tool_choice == "none" else tools
        if add_generation_prompt and continue_final_message:
            raise ValueError(
                "continue_final_message goes on with the last message; give add_generation_prompt=False with it"
            )
        for message in conversation:
            check_text("the content of a message", message.get("content") or "")
        schema = _schema_of(response_format)
        how: dict[str, Any] = {
            "chat_template_kwargs": chat_template_kwargs,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
        }
        if self.own_form and chat_template is None:
            conversation = deepseek_v32.with_tools(conversation, [tool_schema(tool) for tool in tools or ()], schema)
            text = deepseek_v32.render_v32(conversation, self.tokenizer.folder, **how)
            check_text("the text of the conversation", text)
            return text
        folder = str(self.tokenizer.folder)
        return render(self.tokenizer.hf, conversation, folder, chat_template=chat_template, tools=tools, **how)

    def token_ids(self, messages: Any, **options: Any) -> list[int]:
        """The token ids of a conversation; ``options`` are those of :meth:`render`."""
        return self.tokenizer.encode(self.render(messages, **options), add_special_tokens=False)

    def form_of(
        self,
        prompt_text: str,
        form: StructuredOutputsParams | None,
        must_call: Sequence[Any] | None = None,
        several_calls: bool = True,
    ) -> StructuredOutputsParams | None:
        """The form of an answer to a prompt: calls, or else ``form``, after the thought that the answer may begin with.

        Args:
            must_call: tools, in OpenAI's form, of which the answer must call one, or some; None: it need not.
        """
        writer = GrammarWriter(self.tokenizer.tags)
        if must_call is not None:
            source = writer.source((self.calls or PlainCalls()).grammar(writer, must_call, several_calls))
            form = StructuredOutputsParams(grammar=source)
        if form is None:
            return None
        source, thought = form.source(), self._thought(prompt_text)
        if thought is not Thought.NONE:
            writer = GrammarWriter(self.tokenizer.tags)
            source = after_thought(source, writer, THINK, THINK_END, thought is Thought.OPEN)
        return StructuredOutputsParams(grammar=source)

    def reader(
        self,
        prompt_text: str,
        tools: Sequence[Any] | None = None,
        several_calls: bool = True,
        must_call: Sequence[Any] | None = None,
    ) -> MessageReader:
        """A reader for one answer to a prompt, whose end says whether the answer begins inside a thought.

        ``tools``: those that the model was told of; without any, calls are content. ``must_call``: see :meth:`form_of`.
        """
        end_tokens = {self.tokenizer.hf.eos_token, *self.end_tokens} - {None}
        thought, calls = self._thought(prompt_text), self.calls or (PlainCalls() if must_call else None)
        calls = calls if tools else None
        return MessageReader(thought, calls, tools or (), sorted(end_tokens), several_calls)

    def add_messages(
        self, output: RequestOutput, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None
    ) -> None:
        """Adds to each output of a request the assistant's message; ``messages`` and ``tools`` made its prompt."""
        told_of = [*(tools or ()), *(tool for message in messages for tool in message.get("tools") or ())]
        for number, one in enumerate(output.outputs):
            message = self._message(output.prompt or "", one, told_of)
            for index, call in enumerate(message.get("tool_calls", ())):
                call["id"] = f"call_{output.request_id}_{number}_{index}"  # the same on all ranks
            output.outputs[number] = replace(one, message=message)

    def _message(self, prompt: str, output: CompletionOutput, tools: Sequence[Any]) -> dict[str, Any]:
        text = output.text
        if self.needs_special_tokens:
            text = self.tokenizer.decode(output.token_ids, skip_special_tokens=False)
            if isinstance(output.stop_reason, str):
                text = text.partition(output.stop_reason)[0]
        reader = self.reader(prompt, tools)
        return message_of([*reader.push(text), *reader.finish(output.finish_reason == "stop")])

    def _thought(self, prompt: str) -> Thought:
        if self.thoughts is Thought.NONE:
            return Thought.NONE
        last = max(prompt.rfind(THINK), prompt.rfind(THINK_END))
        after, answer = prompt[last:].partition(">")[2], max(map(prompt.rfind, _BEGINNINGS))
        if last >= 0 and (not after.strip() or (0 <= answer < last and deepseek_v32.END not in after)):
            return Thought.OPEN if prompt.startswith(THINK, last) else Thought.NONE
        return self.thoughts


def _schema_of(response_format: Any) -> Any:
    """The JSON schema of OpenAI's ``response_format``; None for text."""
    if response_format is None:
        return None
    if not isinstance(response_format, Mapping):
        raise TypeError(f"response_format must be an object, as OpenAI's API has it, not {shown(response_format)}")
    kind = response_format.get("type")
    if kind == "text":
        return None
    if kind == "json_schema" and isinstance(response_format.get("json_schema"), Mapping):
        return response_format["json_schema"].get("schema")
    return {"type": "object"} if kind == "json_object" else response_format
