"""A reader of answers for the tests of several endpoints."""

from __future__ import annotations

import pytest

from dsa_engine.text.conversations import ConversationFormat, MessageDelta

READ = [
    MessageDelta("reasoning", "Hm, "),
    MessageDelta("reasoning", "so"),
    MessageDelta("content", "I "),
    MessageDelta("content", "look"),
    MessageDelta("call", '{"city": ', 0, "call_0", "weather"),
    MessageDelta("call", '"Rome"}', 0),
    MessageDelta("call", "{}", 1, "call_1", "weather"),
]


class CutReader:
    """Reads an answer as a thought, a content and two calls, whatever its text is."""

    def push(self, text: str) -> list[MessageDelta]:
        return []

    def finish(self, whole: bool) -> list[MessageDelta]:
        return READ


@pytest.fixture
def cut_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ConversationFormat, "reader", lambda *_: CutReader())
