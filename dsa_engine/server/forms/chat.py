"""``/v1/chat/completions``: the form of its requests and answers."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from dsa_engine.config.checks import shown
from dsa_engine.outputs import CompletionOutput, RequestOutput, StreamPiece
from dsa_engine.server.client import EngineClient
from dsa_engine.server.forms.form import Form
from dsa_engine.server.forms.parts import chat_logprobs, prompt_logprobs, selection_of
from dsa_engine.server.forms.protocol import ChatRequest
from dsa_engine.text.conversations import ConversationFormat, MessageDelta, MessageReader, ToolCallDelta
from dsa_engine.text.conversations.deltas import message_of
from dsa_engine.text.conversations.reader import THINK_END


class ChatForm(Form):
    """One request to ``/v1/chat/completions``; ``chat_template`` is that of requests without one."""

    def __init__(
        self,
        llm: EngineClient,
        conversation: ConversationFormat,
        asked: ChatRequest,
        model: str,
        chat_template: str | None = None,
    ):
        super().__init__(asked)
        self._asked = asked
        self._tools, self._must_call = _tools(asked)
        self._several = asked.parallel_tool_calls and not isinstance(asked.tool_choice, dict)
        self.params = asked.sampling({"max_tokens": None} | llm.default_sampling, **_sampling(asked))
        if conversation.needs_special_tokens:
            self.params.skip_special_tokens = False
        self._conversation = conversation
        self._prompt_text = conversation.render(
            asked.messages,
            tools=self._tools,
            tool_choice=asked.tool_choice,
            chat_template=asked.chat_template or chat_template,
            chat_template_kwargs=asked.template_variables,
            add_generation_prompt=asked.add_generation_prompt and not asked.continue_final_message,
            continue_final_message=asked.continue_final_message,
            response_format=asked.response_format,
        )
        self.params.structured_outputs = conversation.form_of(
            self._prompt_text, self.params.structured_outputs, self._must_call, self._several
        )
        prompt = {
            "prompt": self._prompt_text,
            "prompt_token_ids": asked.cut(
                llm.encode_prompt(self._prompt_text, add_special_tokens=False), llm.facts.max_model_len
            ),
        }
        self.prompts = [prompt if asked.cache_salt is None else prompt | {"cache_salt": asked.cache_salt}]
        self._head = {"id": f"chatcmpl-{asked.request_name}", "created": int(time.time()), "model": model}
        self.chunk_head = self._head | {"object": "chat.completion.chunk"}
        self._readers: dict[int, MessageReader] = {}
        self._called: set[int] = set()  # outputs with tool calls
        self._thinks: set[int] = set()  # outputs with a thought
        self._answers: set[int] = set()  # outputs after their thought
        self._in_thought: Counter[int] = Counter()  # tokens of each output before its answer
        self._prompt_ids: Sequence[int] = ()

    def _reader(self) -> MessageReader:
        return self._conversation.reader(self._prompt_text, self._tools, self._several, self._must_call)

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        (one,) = outputs
        answer = self._head | {"object": "chat.completion", "choices": [self._choice(out) for out in one.outputs]}
        answer["prompt_logprobs"] = None if one.prompt_logprobs is None else prompt_logprobs(one.prompt_logprobs)
        return answer | ({"prompt_token_ids": one.prompt_token_ids} if self._asked.return_token_ids else {})

    def usage(self, counts: dict[str, Any]) -> dict[str, Any]:
        return counts | {"completion_tokens_details": {"reasoning_tokens": self._reasoning_tokens}}

    @property
    def _reasoning_tokens(self) -> int:
        return sum(self._in_thought[index] for index in self._thinks)

    def _read(self, reader: MessageReader, output: CompletionOutput | StreamPiece) -> list[MessageDelta]:
        """What further text of an output adds to its message; counts the tokens of its thought."""
        deltas, index = reader.push(output.text), output.index
        if output.finish_reason is not None:
            deltas += reader.finish(output.finish_reason == "stop")
        if any(delta.reasoning for delta in deltas):
            self._thinks.add(index)
        if index not in self._answers:
            ids, end = list(output.token_ids), self._conversation.tokenizer.tags.get(THINK_END, -1)
            self._in_thought[index] += ids.index(end) + 1 if end in ids else len(ids)
            if end in ids or any(delta.content or delta.tool_calls for delta in deltas):
                self._answers.add(index)
        return deltas

    def _choice(self, output: CompletionOutput) -> dict[str, Any]:
        message = message_of(self._read(self._reader(), output))
        thought = _reasoning(message.pop("reasoning_content", None)) if self._asked.include_reasoning else {}
        called = "tool_calls" in message
        choice = {
            "index": output.index,
            "message": message | {"refusal": None} | thought,
            "logprobs": self._logprobs(output),
            "finish_reason": _finish_reason(output, called),
            "stop_reason": output.stop_reason,
        }
        ids = {"token_ids": output.token_ids} if self._asked.return_token_ids else {}
        return choice | selection_of(output.selection) | ids

    def _logprobs(self, output: CompletionOutput | StreamPiece) -> dict[str, Any] | None:
        if output.logprobs is None:
            return None
        top, as_ids = self._asked.top_logprobs or 0, self._asked.return_tokens_as_token_ids
        return chat_logprobs(output.token_ids, output.logprobs, top, as_ids)

    def begin(self, prompts: Sequence[Sequence[int]]) -> None:
        (self._prompt_ids,) = prompts

    def chunks(self, piece: StreamPiece) -> list[dict[str, Any]]:
        chunks = []
        first = piece.index not in self._readers
        reader = self._readers.setdefault(piece.index, self._reader()) if first else self._readers[piece.index]
        if first:
            chunks.append(self._chunk(piece.index, {"role": "assistant", "content": ""}))
            if self._asked.return_token_ids:
                chunks[0]["prompt_token_ids"] = list(self._prompt_ids)
        deltas = [form for delta in self._read(reader, piece) if (form := self._delta(piece.index, delta))]
        logprobs, ids = self._logprobs(piece), self._asked.return_token_ids and piece.token_ids
        if not deltas and (piece.finish_reason or logprobs or ids):
            deltas = [{}]
        chunks += [self._chunk(piece.index, delta) for delta in deltas]
        if deltas:
            (last,) = chunks[-1]["choices"]
            last["logprobs"] = logprobs
            if ids:
                last["token_ids"] = piece.token_ids
            if piece.finish_reason is not None:
                reason = _finish_reason(piece, piece.index in self._called)
                last |= {"finish_reason": reason, "stop_reason": piece.stop_reason}
        return chunks

    def _chunk(self, index: int, delta: dict[str, Any]) -> dict[str, Any]:
        return {"choices": [{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}]}

    def _delta(self, index: int, delta: MessageDelta) -> dict[str, Any]:
        form: dict[str, Any] = {"content": delta.content} if delta.content else {}
        if delta.reasoning and self._asked.include_reasoning:
            form |= _reasoning(delta.reasoning)
        if delta.tool_calls:
            self._called.add(index)
            form["tool_calls"] = [_tool_call(call) for call in delta.tool_calls]
        return form


def _finish_reason(output: CompletionOutput | StreamPiece, called: bool) -> str | None:
    """Calls end an answer only if it is whole: "length" tells a client that the last call is cut."""
    return "tool_calls" if called and output.finish_reason == "stop" else output.finish_reason


def _reasoning(text: str | None) -> dict[str, Any]:
    """The thought, under the two names in use: clients of DeepSeek read the first, newer ones of vLLM the second."""
    return {"reasoning_content": text, "reasoning": text}


def _tool_call(call: ToolCallDelta) -> dict[str, Any]:
    """A piece of a call; the first one has its name."""
    if call.name is None:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": call.index, "id": call.id, "type": "function", "function": function}


def _tools(asked: ChatRequest) -> tuple[list[dict[str, Any]] | None, list[dict[str, Any]] | None]:
    """The tools that the model may call, None if there are none or ``tool_choice`` is "none"; and those of which it
    must call one, None if it need not."""
    choice, tools = asked.tool_choice, asked.tools
    named = choice.get("function") if isinstance(choice, dict) else None
    name = named.get("name") if isinstance(named, dict) else None
    if choice not in (None, "auto", "none", "required") and name is None:
        raise ValueError(
            "tool_choice must be 'auto', 'none', 'required' or {'type': 'function', 'function': {'name': …}}, not "
            f"{shown(choice)}"
        )
    if choice not in (None, "none") and not tools:
        raise ValueError("tool_choice needs tools; give some, or leave it out")
    names = [of.get("name") if isinstance(of := tool.get("function"), dict) else None for tool in tools]
    must_call = tools if choice == "required" else None
    if name is not None:
        must_call = [tool for tool, other in zip(tools, names, strict=True) if other == name]
        if not must_call:
            raise ValueError(f"tool_choice names {shown(name)}; the tools are {', '.join(map(str, names))}")
    return tools if tools and choice != "none" else None, must_call


def _sampling(asked: ChatRequest) -> dict[str, Any]:
    if asked.top_logprobs is not None and not asked.logprobs:
        raise ValueError("top_logprobs needs logprobs; set logprobs to true, or leave it out")
    tokens, logprobs = asked.max_completion_tokens, asked.top_logprobs or 0
    return ({} if tokens is None else {"max_tokens": tokens}) | ({"logprobs": logprobs} if asked.logprobs else {})
