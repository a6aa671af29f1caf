"""What the rule knows of a request, from its body: digests of the blocks of its prompt, and the number of its tokens.

A prompt's canonical text is what a chat template writes, in its order: tools, then the messages, each as JSON with
sorted keys. Requests with the same beginning there have the same beginning in tokens. Prompts of different models or
cache salts have no digest in common. A body may hold anything that JSON can write; what is not understood counts by its
size, as it is the replica that refuses it.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

from dsa_engine.router.rule import Prompt

BLOCK_TOKENS = 64
_TEXT_BYTES = 4  # a token's bytes of UTF-8: 4 to 5 in English, 3 to 5 in Chinese, about 3 in code
_ID_BYTES = 8
_DIGEST_BYTES = 16
_MAX_OUTPUTS = 128  # sequences of one request that are counted


def prompt_of(body: Mapping[str, Any]) -> Prompt:
    """The prompt of a body of ``/v1/chat/completions`` or ``/v1/completions``."""
    before = _canonical([body.get("model"), body.get("cache_salt")])
    prompt, prompts = body.get("prompt"), 1
    if "messages" in body:
        settings = [body.get("tools"), body.get("chat_template"), body.get("chat_template_kwargs")]
        messages = body["messages"]
        parts = [settings, *messages] if isinstance(messages, list) else [settings, messages]
        raw, width = b"\n".join(map(_canonical, parts)), _TEXT_BYTES
    else:
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], list | str):
            prompts = len(prompt)  # the first one's prefix decides
        raw, width = _encoded(prompt)
    n = body.get("n")
    outputs = prompts * (n if isinstance(n, int) and n > 0 else 1)
    return Prompt(
        tokens=-(-len(raw) // width),
        blocks=_digests(before, raw, BLOCK_TOKENS * width),
        streamed=body.get("stream") is True,
        outputs=min(outputs, _MAX_OUTPUTS),
    )


def _encoded(prompt: Any) -> tuple[bytes, int]:
    """Bytes of a prompt of ``/v1/completions``, and how many of them a token has."""
    if isinstance(prompt, str):
        return prompt.encode("utf-8", "surrogatepass"), _TEXT_BYTES
    ids = prompt
    if isinstance(prompt, list) and prompt and all(isinstance(one, list) for one in prompt):
        ids = [token for one in prompt for token in one]
    if isinstance(ids, list) and all(type(token) is int for token in ids):
        try:
            return array("q", ids).tobytes(), _ID_BYTES
        except OverflowError:
            pass
    if isinstance(prompt, list) and all(isinstance(one, str) for one in prompt):
        return "".join(prompt).encode("utf-8", "surrogatepass"), _TEXT_BYTES
    return _canonical(prompt), _TEXT_BYTES


def _canonical(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, sort_keys=True).encode("utf-8", "surrogatepass")


def _digests(before: bytes, raw: bytes, size: int) -> list[bytes]:
    """Digests of the full blocks of ``size`` bytes; each covers ``before`` and all blocks until its own."""
    chain, digests = blake2b(before, digest_size=_DIGEST_BYTES).digest(), []
    view = memoryview(raw)
    for begin in range(0, len(raw) - size + 1, size):
        digest = blake2b(chain, digest_size=_DIGEST_BYTES)
        digest.update(view[begin : begin + size])
        chain = digest.digest()
        digests.append(chain)
    return digests
