"""``/v1/messages``: Anthropic's Messages API."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

from pydantic import BaseModel, Field

from dsa_engine.config.checks import shown
from dsa_engine.server.errors import ApiError
from dsa_engine.server.forms.blocks import Block, BlockForm, Event
from dsa_engine.server.forms.parts import usage
from dsa_engine.server.forms.protocol import ChatRequest, Effort, RequestBody
from dsa_engine.server.forms.responses import ResponsesRequest
from dsa_engine.text.conversations.messages import arguments_of

# A block of Claude Code's system message that differs in every request: with it no prefix would be found again.
_BILLING = "x-anthropic-billing-header"
_ROLES = ("user", "assistant", "system")
_SIGNATURE = "dW5zaWduZWQ="  # "unsigned": clients keep no thought without one; here it is not read


class _Thinking(BaseModel):
    type: Literal["enabled", "adaptive", "between_tools", "disabled"]
    budget_tokens: int | None = Field(None, ge=1)
    display: Literal["summarized", "omitted"] | None = None


class _ToolChoice(BaseModel):
    type: Literal["auto", "any", "tool", "none"]
    name: str = ""
    disable_parallel_tool_use: bool = False


class _Output(BaseModel):
    effort: Effort | None = None
    format: dict[str, Any] | None = None


class CountRequest(RequestBody):
    """The body of a request to ``/v1/messages/count_tokens``."""

    messages: list[dict[str, Any]] = Field([], max_length=10_000)
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] = Field([], max_length=512)
    tool_choice: _ToolChoice = _ToolChoice(type="auto")
    thinking: _Thinking | None = None
    output_config: _Output = _Output()
    max_tokens: int | None = Field(None, ge=1)
    stop_sequences: list[str] | None = None
    stream: bool = False
    stream_options: dict[str, Any] | None = None

    @property
    def chat(self) -> ChatRequest:
        """The chat request that asks for the same, by way of a response's; raises ``ValueError`` if there is none."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        items = [item for message in [*system, *self.messages] for item in _items(message)]
        choice, thinking = self.tool_choice, self.thinking
        response = {
            "input": items,
            "tools": [_tool(tool) for tool in self.tools],
            "tool_choice": {"any": "required", "tool": {"name": choice.name}}.get(choice.type, choice.type),
            "parallel_tool_calls": not choice.disable_parallel_tool_use,
            "text": {"format": self.output_config.format},
            "reasoning": {"effort": self.output_config.effort},
            "stream": self.stream,
            "thinking": thinking
            and {
                "type": "disabled" if thinking.type == "disabled" else "enabled",
                "budget_tokens": thinking.budget_tokens,
            },
            "include_reasoning": thinking is None or thinking.display != "omitted",
            "max_tokens": self.max_tokens,
            "stop": self.stop_sequences,
            "continue_final_message": bool(items) and items[-1].get("role") == "assistant",
        }
        return ResponsesRequest.model_validate((self.model_extra or {}) | response).chat


class MessagesRequest(CountRequest):
    """The body of a request to ``/v1/messages``."""

    max_tokens: int = Field(ge=1)


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    if tool.get("type", "custom") not in ("custom", None) or not isinstance(tool.get("name"), str):
        raise ValueError(
            "tools must be {'name': …, 'input_schema': {…}}, to be called by the client; the server has none, and the "
            f"model knows none by a type: {shown(tool)}"
        )
    return tool | {"type": "function", "parameters": tool.get("input_schema")}


def _items(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The items of a response's input that ask for the same as a message."""
    role, content = message.get("role"), message.get("content")
    if role not in _ROLES:
        raise ValueError(f"messages have the roles {', '.join(_ROLES)}, not {shown(role)}")
    results, thoughts, texts, calls = (list[Any]() for _ in range(4))
    for block in content if isinstance(content, list) else [{"type": "text", "text": content}]:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "tool_result":
            about = {"call_id": block.get("tool_use_id"), "output": block.get("content") or ""}
            results.append({"type": "function_call_output"} | about)
        elif kind == "tool_use":
            about = {"call_id": block.get("id"), "name": block.get("name"), "arguments": block.get("input")}
            calls.append({"type": "function_call"} | about)
        elif kind == "thinking":
            thoughts.append({"text": block.get("thinking")})
        elif kind != "redacted_thinking" and not (kind == "text" and str(block.get("text")).startswith(_BILLING)):
            texts.append(block)
    reasoning = [{"type": "reasoning", "content": thoughts}] if thoughts else []
    return [*results, *reasoning, *([{"role": role, "content": texts}] if texts else []), *calls]


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
