"""``/v1/responses``: OpenAI's Responses API."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, Field

from dsa_engine.config.checks import shown
from dsa_engine.server.errors import ApiError
from dsa_engine.server.forms.blocks import Block, BlockForm, Event
from dsa_engine.server.forms.protocol import ChatRequest, Effort, RequestBody

_ITEMS = "message, reasoning, function_call and function_call_output"


class _Text(BaseModel):
    format: dict[str, Any] | None = None


class _Reasoning(BaseModel):
    effort: Effort | None = None


class ResponsesRequest(RequestBody):
    """The body of a request to ``/v1/responses``. Nothing is stored, so ``input`` is the whole conversation."""

    input: str | list[dict[str, Any]] = Field([], max_length=2**24)
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    stream: bool = False
    stream_options: dict[str, Any] | None = None
    tools: list[dict[str, Any]] = Field([], max_length=512)
    tool_choice: Any = None
    parallel_tool_calls: bool = True
    text: _Text = _Text()
    reasoning: _Reasoning = _Reasoning()
    metadata: dict[str, Any] | None = None
    include: list[str] = []
    top_logprobs: int | None = Field(None, ge=0)

    @property
    def chat(self) -> ChatRequest:
        """The chat request that asks for the same; raises ``ValueError`` if there is none."""
        choice, form = self.tool_choice, self.text.format
        if isinstance(choice, dict) and "name" in choice:
            choice = {"type": "function", "function": {"name": choice["name"]}}
        if form and form.get("type") == "json_schema":
            form = {"type": "json_schema", "json_schema": {k: v for k, v in form.items() if k != "type"}}
        logprobs = "message.output_text.logprobs" in self.include
        return _AsChat(
            messages=_messages(self.instructions, self.input),
            tools=[_tool(tool) for tool in self.tools],
            tool_choice=choice if self.tools else None,
            parallel_tool_calls=self.parallel_tool_calls,
            response_format=form,
            reasoning_effort=self.reasoning.effort,
            max_completion_tokens=self.max_output_tokens,
            logprobs=logprobs,
            top_logprobs=self.top_logprobs if logprobs else None,
            stream=self.stream,
            **(self.model_extra or {}),
        )


class _AsChat(ChatRequest):
    max_output_name = "max_output_tokens"


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    if tool.get("type") != "function" or not isinstance(tool.get("name"), str):
        raise ValueError(
            f"tools must be {{'type': 'function', 'name': …}}, as no other tools are here, not {shown(tool)}"
        )
    about = {name: tool[name] for name in ("name", "description", "parameters") if tool.get(name) is not None}
    return {"type": "function", "function": about}


def _messages(instructions: str | None, given: str | Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The conversation of instructions and items. What an assistant thought, said and called is one message."""
    messages: list[dict[str, Any]] = [] if instructions is None else [{"role": "system", "content": instructions}]

    def assistant(*without: str) -> dict[str, Any]:
        """The last message, if it is the assistant's and has none of these; otherwise a new one."""
        if not messages or messages[-1]["role"] != "assistant" or any(name in messages[-1] for name in without):
            messages.append({"role": "assistant"})
        return messages[-1]

    items: Sequence[Mapping[str, Any]] = [{"role": "user", "content": given}] if isinstance(given, str) else given
    for item in items:
        kind, role = item.get("type") or "message", item.get("role")
        if kind == "message" and role == "assistant":
            assistant("content", "tool_calls")["content"] = item.get("content")
        elif kind == "message":
            messages.append({"role": "system" if role == "developer" else role, "content": item.get("content")})
        elif kind == "reasoning":
            parts = item.get("content") or item.get("summary") or []
            if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
                raise ValueError(f"input has reasoning whose content is no list of texts, but {shown(parts)}")
            if thought := "\n".join(str(part.get("text")) for part in parts):
                assistant("reasoning_content", "content", "tool_calls")["reasoning_content"] = thought
        elif kind == "function_call":
            function = {name: item.get(name) for name in ("name", "arguments")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            assistant().setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            about = {"tool_call_id": item.get("call_id"), "content": item.get("output")}
            messages.append({"role": "tool"} | about)
        else:
            raise ValueError(f"input has an item of the type {shown(kind)}; there are {_ITEMS}, and nothing is stored")
    return messages


# By kind of a block: its type, how its id begins, and how its text is called.
_NAMES = {
    "reasoning": ("reasoning", "rs", "reasoning_text"),
    "content": ("message", "msg", "output_text"),
    "call": ("function_call", "fc", "function_call_arguments"),
}


class _Item(Block):
    """An item of the output."""

    def __init__(self, *about: Any):
        super().__init__(*about)
        self.type, prefix, self._name = _NAMES[self.kind]
        self._logprobs: list[Any] = []
        self._where: dict[str, Any] = {"item_id": f"{prefix}_{uuid.uuid4().hex}", "output_index": self.index}
        if self.call is None:
            self._where["content_index"] = 0

    def form(self, status: str) -> dict[str, Any]:
        """The item as it is now."""
        form: dict[str, Any] = {"id": self._where["item_id"], "type": self.type, "status": status}
        if self.call is not None:
            return form | {"call_id": self.call.id, "name": self.call.name, "arguments": self.text}
        form["content"] = [] if status == "in_progress" else [self._part]
        form["role" if self.type == "message" else "summary"] = "assistant" if self.type == "message" else []
        return form

    @property
    def _part(self) -> dict[str, Any]:
        part: dict[str, Any] = {"type": self._name, "text": self.text}
        return part | {"annotations": [], "logprobs": self._logprobs} if self.type == "message" else part

    def begin(self) -> Iterator[Event]:
        yield {"type": "response.output_item.added", "output_index": self.index, "item": self.form("in_progress")}
        if self.call is None:
            yield {"type": "response.content_part.added", **self._where, "part": self._part}

    def delta(self, text: str, logprobs: list[Any]) -> Event:
        self._logprobs += logprobs
        delta = {"type": f"response.{self._name}.delta", **self._where, "delta": text}
        return delta | ({"logprobs": logprobs} if self.type == "message" else {})

    def end(self, cut: bool) -> Iterator[Event]:
        whole = {"type": f"response.{self._name}.done", **self._where}
        if self.call is not None:
            yield whole | {"arguments": self.text, "name": self.call.name}
        else:
            yield whole | {"text": self.text} | ({"logprobs": []} if self.type == "message" else {})
            yield {"type": "response.content_part.done", **self._where, "part": self._part}
        item = self.form("incomplete" if cut else "completed")
        yield {"type": "response.output_item.done", "output_index": self.index, "item": item}


class ResponsesForm(BlockForm[ResponsesRequest]):
    """One request to ``/v1/responses``."""

    prefix, block = "resp_", _Item

    def __init__(self, *of_conversation: Any):
        super().__init__(*of_conversation)
        self._number = 0  # the next event's

    @property
    def _status(self) -> str:
        return "incomplete" if self._cut else "completed"

    def _response(self, status: str, usage: Any = None, error: Any = None) -> dict[str, Any]:
        asked, params = self._given, self.params
        return {
            "id": self._head["id"], "object": "response", "created_at": self._head["created"],
            "model": self._head["model"], "status": status, "error": error,
            "output": [one.form(status) for one in self._blocks],
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": asked.instructions, "max_output_tokens": asked.max_output_tokens,
            "metadata": asked.metadata or {}, "temperature": params.temperature, "top_p": params.top_p,
            "tools": asked.tools, "tool_choice": asked.tool_choice or "auto", "store": False, "background": False,
            "parallel_tool_calls": asked.parallel_tool_calls, "previous_response_id": None, "truncation": "disabled",
            "text": {"format": asked.text.format or {"type": "text"}},
            "reasoning": {"effort": self._asked.reasoning_effort, "summary": None}, "usage": usage,
        }  # fmt: skip

    def answer(self) -> dict[str, Any]:
        return self._response(self._status)

    def usage(self, counts: dict[str, Any]) -> dict[str, Any]:
        return {
            "input_tokens": counts["prompt_tokens"],
            "input_tokens_details": counts["prompt_tokens_details"] | {"cache_write_tokens": 0},
            "output_tokens": counts["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": self._reasoning_tokens},
            "total_tokens": counts["total_tokens"],
        }

    def first(self) -> Iterable[Event]:
        for name in ("created", "in_progress"):
            yield {"type": f"response.{name}", "response": self._response("in_progress")}

    def last(self, usage: dict[str, Any]) -> list[Event]:
        return [{"type": f"response.{self._status}", "response": self._response(self._status, self.usage(usage))}]

    def event(self, chunk: Event) -> bytes:
        numbered = chunk | {"sequence_number": self._number}
        self._number += 1
        return super().event(numbered)

    def failed(self, error: ApiError) -> bytes:
        reason = {"code": "server_error", "message": error.detail}
        return self.event({"type": "response.failed", "response": self._response("failed", error=reason)})
