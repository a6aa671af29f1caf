"""An answer as blocks that grow, one after the other: what responses and messages have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from dsa_engine.outputs import CompletionOutput, RequestOutput, StreamPiece
from dsa_engine.server.forms.conversation import ConversationForm, Given
from dsa_engine.server.forms.form import to_json
from dsa_engine.text.conversations import MessageDelta

Event = dict[str, Any]


class Block(ABC):
    """A thought, a content or a call, number ``index`` of an answer, and its ``first`` piece."""

    def __init__(self, first: MessageDelta, index: int):
        self.kind, self.index, self.call = first.kind, index, first if first.kind == "call" else None
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
            if delta.kind == "content":
                events += self._grow(delta, logprobs)
                logprobs = []
            elif delta.kind == "call" or self._asked.include_reasoning:
                events += self._grow(delta)
        if whole:
            events += [] if self._blocks else self._grow(MessageDelta("content", ""))
            events += self._blocks[-1].end(self._cut)
        return events

    def _grow(self, delta: MessageDelta, logprobs: Sequence[Any] = ()) -> Iterator[Event]:
        """The events of further text; a new block begins with another kind, and with a new call."""
        if delta.name is not None or not self._blocks or self._blocks[-1].kind != delta.kind:
            if self._blocks:
                yield from self._blocks[-1].end(False)
            self._blocks.append(self.block(delta, len(self._blocks)))
            yield from self._blocks[-1].begin()
        if delta.text:
            yield self._blocks[-1].add(delta.text, list(logprobs))

    def event(self, chunk: Event) -> bytes:
        return b"event: %b\ndata: %b\n\n" % (chunk["type"].encode(), to_json(chunk))
