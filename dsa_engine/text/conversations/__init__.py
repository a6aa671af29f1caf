"""Conversations as released: the prompt of a conversation, and the message that an answer's text is.

``conversation_format(folder, model_type)`` chooses the form. Its ``render`` makes the prompt's text; its ``reader``
takes the answer's text in pieces and gives the thought, the content and the tool calls in pieces.
"""

from dsa_engine.text.conversations.deltas import MessageDelta, ToolCallDelta
from dsa_engine.text.conversations.format import ConversationFormat, conversation_format
from dsa_engine.text.conversations.reader import MessageReader

__all__ = ["ConversationFormat", "MessageDelta", "MessageReader", "ToolCallDelta", "conversation_format"]
