"""``/v1/messages``: Anthropic's Messages API."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

from pydantic import BaseModel, Field

from dsa_engine.config.checks import shown
from dsa_engine.server.errors import ApiError
from dsa_engine.server.forms.blocks import Block, BlockForm, Event
from dsa_engine.server.forms.parts import usage
from dsa_engine.server.forms.protocol import ChatRequest, Effort, OtherRequest, tool_of
from dsa_engine.text.conversations.messages import arguments_of

# Claude Code's system message begins with a line that differs in every request: no prefix would be found again.
_BILLING = "x-anthropic-billing-header"
_BLOCKS = {"user": ("text", "tool_result"), "assistant": ("text", "thinking", "tool_use"), "system": ("text",)}
_SIGNATURE = "dW5zaWduZWQ="  # "unsigned": clients keep no thought without one; here it is not read


class _Thinking(BaseModel):
    type: Literal["enabled", "adaptive", "between_tools", "disabled"]
    budget_tokens: int | None = Field(None, ge=1)
    display: Literal["summarized", "omitted"] | None = None


class _ToolChoice(BaseModel):
    type: Literal["auto", "any", "tool", "none"]
    name: str = ""
    disable_parallel_tool_use: bool = False

    @property
    def chat(self) -> Any:
        """The ``tool_choice`` of a chat request."""
        if self.type == "tool":
            return {"type": "function", "function": {"name": self.name}}
        return {"auto": None, "any": "required", "none": "none"}[self.type]


class _Output(BaseModel):
    effort: Effort | None = None
    format: dict[str, Any] | None = None


class CountRequest(OtherRequest):
    """The body of a request to ``/v1/messages/count_tokens``."""

    messages: list[dict[str, Any]] = Field([], max_length=10_000)
    system: str | list[dict[str, Any]] | None = None
    tool_choice: _ToolChoice = _ToolChoice(type="auto")
    thinking: _Thinking | None = None
    output_config: _Output = _Output()
    max_tokens: int | None = Field(None, ge=1)
    stop_sequences: list[str] | None = None

    @property
    def chat(self) -> ChatRequest:
        messages, thinking, choice = _messages(self.system, self.messages), self.thinking, self.tool_choice
        last = messages[-1] if messages else {}
        return self.as_chat(
            ChatRequest,
            messages=messages,
            tools=[_tool(tool) for tool in self.tools],
            tool_choice=choice.chat,
            parallel_tool_calls=not choice.disable_parallel_tool_use,
            response_format=self.output_config.format,
            reasoning_effort=self.output_config.effort,
            thinking=thinking and thinking.type != "disabled",
            thinking_token_budget=thinking and thinking.budget_tokens,
            include_reasoning=thinking is None or thinking.display != "omitted",
            max_tokens=self.max_tokens,
            stop=self.stop_sequences,
            continue_final_message=last.get("role") == "assistant" and "tool_calls" not in last,
        )


class MessagesRequest(CountRequest):
    """The body of a request to ``/v1/messages``."""

    max_tokens: int = Field(ge=1)


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    if tool.get("type", "custom") not in ("custom", None) or not isinstance(tool.get("name"), str):
        raise ValueError(
            "tools must be {'name': …, 'input_schema': {…}}, to be called by the client; the server has none, and the "
            f"model knows none by a type: {shown(tool)}"
        )
    return tool_of(tool, tool.get("input_schema"))


def _messages(system: Any, given: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The conversation as chat requests have it: results of tools are messages of their own."""
    messages: list[dict[str, Any]] = []
    for message in [*([{"role": "system", "content": system}] if system else ()), *given]:
        role, content = message.get("role"), message.get("content")
        if role not in _BLOCKS:
            raise ValueError(f"messages have the roles {', '.join(_BLOCKS)}, not {shown(role)}")
        texts: list[dict[str, Any]] = []
        thoughts: list[str] = []
        calls: list[dict[str, Any]] = []
        results: list[dict[str, Any]] = []
        for block in content if isinstance(content, list) else [{"type": "text", "text": content}]:
            kind = block.get("type") if isinstance(block, dict) else None
            if kind == "redacted_thinking":
                continue
            if kind not in _BLOCKS[role]:
                kinds = ", ".join(_BLOCKS[role])
                raise ValueError(f"messages of the role {role} have blocks of the types {kinds}, not {shown(block)}")
            if kind == "text" and not (role == "system" and str(block.get("text")).startswith(_BILLING)):
                texts.append(block)
            elif kind == "thinking":
                thoughts.append(str(block.get("thinking")))
            elif kind == "tool_use":
                function = {"name": block.get("name"), "arguments": block.get("input")}
                calls.append({"id": block.get("id"), "type": "function", "function": function})
            elif kind == "tool_result":
                about = {"tool_call_id": block.get("tool_use_id"), "content": block.get("content") or ""}
                results.append({"role": "tool"} | about)
        parts = {"content": texts, "reasoning_content": "\n".join(thoughts), "tool_calls": calls}
        one = {"role": role} | {name: part for name, part in parts.items() if part}
        messages += results
        if len(one) > 1 or role == "assistant":
            messages.append(one)
    return messages


class _Block(Block):
    """A block of the content."""

    _signature = ""  # until its end

    @property
    def form(self) -> dict[str, Any]:
        """The block as it is now."""
        if self.call is not None:
            about = {"id": self.call.id, "name": self.call.name, "input": arguments_of(self.text)}
            return {"type": "tool_use"} | about
        if self.kind == "content":
            return {"type": "text", "text": self.text}
        return {"type": "thinking", "thinking": self.text, "signature": self._signature}

    def _delta(self, kind: str, name: str, text: str) -> Event:
        return {"type": "content_block_delta", "index": self.index, "delta": {"type": kind, name: text}}

    def begin(self) -> Iterator[Event]:
        yield {"type": "content_block_start", "index": self.index, "content_block": self.form}

    def delta(self, text: str, logprobs: list[Any]) -> Event:
        names = {
            "reasoning": ("thinking_delta", "thinking"),
            "content": ("text_delta", "text"),
            "call": ("input_json_delta", "partial_json"),
        }
        return self._delta(*names[self.kind], text)

    def end(self, cut: bool) -> Iterator[Event]:
        if self.kind == "reasoning":
            self._signature = _SIGNATURE
            yield self._delta("signature_delta", "signature", _SIGNATURE)
        yield {"type": "content_block_stop", "index": self.index}


class MessagesForm(BlockForm[CountRequest]):
    """One request to ``/v1/messages``."""

    prefix, block = "msg_", _Block

    def _stop(self) -> dict[str, Any]:
        """Why the answer ended."""
        if (last := self._last) is None:
            return {"stop_reason": None, "stop_sequence": None}
        text = last.stop_reason if isinstance(last.stop_reason, str) else None
        reason = {"tool_calls": "tool_use", "length": "max_tokens"}.get(self._finish_reason(last) or "")
        reason = reason or ("end_turn" if text is None else "stop_sequence")
        return {"stop_reason": reason, "stop_sequence": text if reason == "stop_sequence" else None}

    def answer(self) -> dict[str, Any]:
        about = {"id": self._head["id"], "type": "message", "role": "assistant", "model": self._head["model"]}
        return about | {"content": [block.form for block in self._blocks]} | self._stop()

    def usage(self, counts: dict[str, Any]) -> dict[str, Any]:
        cached = counts["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": counts["prompt_tokens"] - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": counts["completion_tokens"],
            "output_tokens_details": {"thinking_tokens": self._reasoning_tokens},
        }

    @property
    def count(self) -> dict[str, int]:
        """The answer of ``/v1/messages/count_tokens``."""
        return {"input_tokens": len(self.prompts[0]["prompt_token_ids"])}

    def first(self) -> Iterable[Event]:
        so_far = self.usage(usage(self.count["input_tokens"], 0, 0))
        yield {"type": "message_start", "message": self.answer() | {"usage": so_far}}

    def last(self, usage: dict[str, Any]) -> list[Event]:
        return [
            {"type": "message_delta", "delta": self._stop(), "usage": self.usage(usage)},
            {"type": "message_stop"},
        ]

    def failed(self, error: ApiError) -> bytes:
        return self.event(error.body("/v1/messages"))
