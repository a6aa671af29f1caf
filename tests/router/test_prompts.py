"""Prompts as the router sees them: common beginnings in blocks, token counts, and bodies that make no sense."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsa_engine.router.prompts import BLOCK_TOKENS, prompt_of


def common(first: dict[str, Any], second: dict[str, Any]) -> int:
    """Number of blocks that two bodies have in common; they are the first ones."""
    a, b = prompt_of(first).blocks, prompt_of(second).blocks
    same = [x == y for x, y in zip(a, b)]
    assert same == sorted(same, reverse=True) and len(set(a) & set(b)) == sum(same)
    return sum(same)


TEXT = "The quick brown fox jumps over the lazy dog. " * 100  # 4,500 bytes
ASKED = [{"role": "system", "content": TEXT}, {"role": "user", "content": "Why?"}]


def test_a_conversation_that_goes_on_has_the_same_beginning() -> None:
    more = [*ASKED, {"role": "assistant", "content": "So."}, {"role": "user", "content": TEXT}]
    first = prompt_of({"model": "m", "messages": ASKED})
    assert common({"model": "m", "messages": ASKED}, {"messages": more, "model": "m", "stream": True}) == 17
    assert len(first.blocks) == first.tokens // BLOCK_TOKENS == 17
    assert 4500 / 4 < first.tokens < 4700 / 4
    turned = [dict(reversed(message.items())) for message in ASKED]
    assert common({"messages": ASKED, "temperature": 0}, {"messages": turned, "max_tokens": 7}) == 17


@pytest.mark.parametrize(
    "other",
    [{"model": "n"}, {"cache_salt": "s"}, {"tools": [{"type": "function"}]}, {"chat_template_kwargs": {"a": 1}}],
)
def test_what_changes_the_beginning_leaves_nothing_in_common(other: dict[str, Any]) -> None:
    assert common({"model": "m", "messages": ASKED}, {"model": "m", "messages": ASKED} | other) == 0


def test_completions() -> None:
    ids = list(range(1000))
    assert prompt_of({"prompt": ids}).tokens == prompt_of({"prompt": [ids[:400], ids[400:]]}).tokens == 1000
    assert common({"prompt": ids}, {"prompt": ids[:640] + [0]}) == 10
    assert common({"prompt": TEXT}, {"prompt": TEXT[:1024] + "!"}) == 4
    assert common({"prompt": TEXT}, {"prompt": [TEXT, "another one"]}) == len(prompt_of({"prompt": TEXT}).blocks)
    assert prompt_of({"prompt": TEXT}).tokens == 1125
    assert prompt_of({"prompt": "漢字" * 200}).tokens == 300


def test_streams_and_outputs() -> None:
    assert not prompt_of({"prompt": "a"}).streamed and prompt_of({"prompt": "a", "stream": True}).streamed
    assert prompt_of({"prompt": ["a", "b"], "n": 3}).outputs == 6
    assert [prompt_of({"prompt": "a", "n": n}).outputs for n in (10**50, -1, "2", None)] == [128, 1, 1, 1]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(codec=None)),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)
KEYS = st.sampled_from(["prompt", "messages", "model", "cache_salt", "tools", "n", "stream", "other"])


@settings(max_examples=50)
@given(st.dictionaries(KEYS, JSON, max_size=3))
def test_any_json_is_counted(body: dict[str, Any]) -> None:
    """Wrong types, half surrogate pairs, huge numbers: it is for the replica to refuse them."""
    made = prompt_of(json.loads(json.dumps(body)))
    assert made.tokens >= 0 and 1 <= made.outputs <= 128 and len(made.blocks) <= made.tokens // BLOCK_TOKENS


def test_ids_beyond_64_bits_are_counted() -> None:
    assert prompt_of({"prompt": [2**70, 1]}).tokens > 0 and prompt_of({"prompt": [True, 1]}).tokens > 0
