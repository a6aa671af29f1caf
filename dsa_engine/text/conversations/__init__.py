"""Conversations as released: the prompt of a conversation, and the message that an answer's text is.

``conversation_format(folder, model_type)`` chooses the form. Its ``render`` makes the prompt's text, by the folder's
chat template or in DeepSeek-V3.2's own form (``deepseek_v32.py``). Its ``reader`` takes the answer's text in pieces and
gives the thought, the content and the tool calls in pieces, each as early as it is certain.

A further family needs:

* a ``CallForm`` in ``tool_calls.py``: the tags that open its tool calls, and ``read``, a generator that asks the
  ``TextSource`` for one tag after the other; where it gets another, ``TextSource`` raises, and the text is content;
* an entry for it in ``families.py``, under vLLM's name, and a mark by which its chat template is known;
* for thoughts with other tags than ``<think>``: their tags, instead of the constants in ``reader.py``;
* in the tests, a writer of its calls in ``WRITERS``, and a template in ``FAMILIES``.
"""

from dsa_engine.text.conversations.deltas import MessageDelta
from dsa_engine.text.conversations.format import ConversationFormat, conversation_format
from dsa_engine.text.conversations.reader import MessageReader

__all__ = ["ConversationFormat", "MessageDelta", "MessageReader", "conversation_format"]
