"""``/v1/chat/completions``: the form of its answers; its requests are those of every conversation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dsa_engine.outputs import CompletionOutput, RequestOutput, StreamPiece
from dsa_engine.server.forms.conversation import ConversationForm
from dsa_engine.server.forms.parts import prompt_logprobs, selection_of
from dsa_engine.server.forms.protocol import ChatRequest
from dsa_engine.text.conversations import MessageDelta
from dsa_engine.text.conversations.deltas import message_of


class ChatForm(ConversationForm[ChatRequest]):
    """One request to ``/v1/chat/completions``."""

    prefix = "chatcmpl-"

    def __init__(self, *of_conversation: Any):
        super().__init__(*of_conversation)
        self.chunk_head = self._head | {"object": "chat.completion.chunk"}

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        (one,) = outputs
        answer = self._head | {"object": "chat.completion", "choices": [self._choice(out) for out in one.outputs]}
        answer["prompt_logprobs"] = None if one.prompt_logprobs is None else prompt_logprobs(one.prompt_logprobs)
        return answer | ({"prompt_token_ids": one.prompt_token_ids} if self._asked.return_token_ids else {})

    def usage(self, counts: dict[str, Any]) -> dict[str, Any]:
        return counts | {"completion_tokens_details": {"reasoning_tokens": self._reasoning_tokens}}

    def _choice(self, output: CompletionOutput) -> dict[str, Any]:
        message = message_of(self._read(output))
        thought = _reasoning(message.pop("reasoning_content", None)) if self._asked.include_reasoning else {}
        choice = {
            "index": output.index,
            "message": message | {"refusal": None} | thought,
            "logprobs": self._logprobs(output),
            "finish_reason": self._finish_reason(output),
            "stop_reason": output.stop_reason,
        }
        ids = {"token_ids": output.token_ids} if self._asked.return_token_ids else {}
        return choice | selection_of(output.selection) | ids

    def chunks(self, piece: StreamPiece) -> list[dict[str, Any]]:
        chunks = []
        first = piece.index not in self._readers
        if first:
            chunks.append(self._chunk(piece.index, {"role": "assistant", "content": ""}))
            if self._asked.return_token_ids:
                chunks[0]["prompt_token_ids"] = list(self.prompt_ids[0])
        deltas = [form for delta in self._read(piece) if (form := self._delta(delta))]
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
                last |= {"finish_reason": self._finish_reason(piece), "stop_reason": piece.stop_reason}
        return chunks

    def _chunk(self, index: int, delta: dict[str, Any]) -> dict[str, Any]:
        return {"choices": [{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}]}

    def _delta(self, delta: MessageDelta) -> dict[str, Any]:
        if delta.kind == "reasoning":
            return _reasoning(delta.text) if self._asked.include_reasoning else {}
        return {"content": delta.text} if delta.kind == "content" else {"tool_calls": [_tool_call(delta)]}


def _reasoning(text: str | None) -> dict[str, Any]:
    """The thought, under the two names in use: clients of DeepSeek read the first, newer ones of vLLM the second."""
    return {"reasoning_content": text, "reasoning": text}


def _tool_call(call: MessageDelta) -> dict[str, Any]:
    """A piece of a call; the first one has its name."""
    if call.name is None:
        return {"index": call.number, "function": {"arguments": call.text}}
    function = {"name": call.name, "arguments": call.text}
    return {"index": call.number, "id": call.id, "type": "function", "function": function}
