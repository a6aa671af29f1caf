"""The reader of an answer: text in pieces becomes pieces of a message."""

from __future__ import annotations

from dsa_engine.text.conversations.deltas import MessageDelta


class MessageReader:
    """Reads one answer. The pieces, joined, do not depend on where the text is cut."""

    def push(self, text: str) -> list[MessageDelta]:
        """What further text of the answer adds to the message, as far as it is certain."""
        return [MessageDelta(content=text)] if text else []

    def finish(self) -> list[MessageDelta]:
        """What the end of the answer adds: text that could have become a tag."""
        return []
