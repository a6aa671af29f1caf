"""An answer as blocks that grow, one after the other: what responses and messages have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

from dsa_engine.outputs import CompletionOutput, RequestOutput, StreamPiece
from dsa_engine.server.forms.conversation import ConversationForm, Given
from dsa_engine.server.forms.form import to_json
from dsa_engine.text.conversations import ToolCallDelta

Event = dict[str, Any]
Kind = Literal["reasoning", "content", "call"]


class Block(ABC):
    """A thought, a content or a call, number ``index`` of an answer. ``call`` is the first piece of one."""

    def __init__(self, kind: Kind, index: int, call: ToolCallDelta | None):
        self.kind, self.index, self.call = kind, index, call
        self._texts: list[str] = []

    @property
    def text(self) -> str:
        """The text so far; of a call, the JSON of its arguments."""
        return "".join(self._texts)

    @abstractmethod
    def begin(self) -> Iterator[Event]: ...

    def add(self, text: str, logprobs: list[Any]) -> Event:
        """The event of further text; ``logprobs``: of the tokens of a content."""
        self._texts.append(text)
        return self.delta(text, logprobs)

    @abstractmethod
    def delta(self, text: str, logprobs: list[Any]) -> Event: ...

    @abstractmethod
    def end(self, cut: bool) -> Iterator[Event]:
        """The last events; ``cut``: the answer is, at its maximum length."""


class BlockForm(ConversationForm[Given]):
    """A request whose answer is one list of blocks, and whose stream is of events with names."""

    end_of_stream = b""
    block: type[Block]

    def __init__(self, *of_conversation: Any):
        super().__init__(*of_conversation)
        if self.params.n > 1:
            raise ValueError(f"n must be 1 in a response, not {self.params.n}; send several requests")
        self._blocks: list[Any] = []
        self._last: CompletionOutput | StreamPiece | None = None  # it says why the answer ended

    @property
    def _cut(self) -> bool:
        return self._last is not None and self._last.finish_reason == "length"

    @abstractmethod
    def first(self) -> Iterable[Event]:
        """The events before the blocks."""

    @abstractmethod
    def answer(self) -> dict[str, Any]:
        """The answer, after its last block."""

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        ((output,),) = (one.outputs for one in outputs)
        self.chunks(output)  # the blocks grow as in a stream
        return self.answer()

    def chunks(self, piece: CompletionOutput | StreamPiece) -> list[Event]:
        events = [] if self._readers else [*self.first()]
        whole = piece.finish_reason is not None
        if whole:
            self._last = piece
        logprobs = (self._logprobs(piece) or {"content": []})["content"]
        for delta in self._read(piece):
            if delta.reasoning and self._asked.include_reasoning:
                events += self._grow("reasoning", delta.reasoning)
            if delta.content:
                events += self._grow("content", delta.content, logprobs=logprobs)
                logprobs = []
            for call in delta.tool_calls:
                events += self._grow("call", call.arguments, call if call.name is not None else None)
        if whole:
            events += [] if self._blocks else self._grow("content", "")
            events += self._blocks[-1].end(self._cut)
        return events

    def _grow(
        self, kind: Kind, text: str, call: ToolCallDelta | None = None, logprobs: Sequence[Any] = ()
    ) -> Iterator[Event]:
        """The events of further text; a new block begins with another kind, and with a new call."""
        if call or not self._blocks or self._blocks[-1].kind != kind:
            if self._blocks:
                yield from self._blocks[-1].end(False)
            self._blocks.append(self.block(kind, len(self._blocks), call))
            yield from self._blocks[-1].begin()
        if text:
            yield self._blocks[-1].add(text, list(logprobs))

    def event(self, chunk: Event) -> bytes:
        return b"event: %b\ndata: %b\n\n" % (chunk["type"].encode(), to_json(chunk))
