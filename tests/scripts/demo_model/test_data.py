"""Tokenizer, documents and cases."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from demo_model.corpus import documents_of
from demo_model.data import ANSWER, Documents, draw_facts
from demo_model.evaluation import conversation
from demo_model.guides import guides_of
from demo_model.recipe import Phase
from dsa_engine.demo import trained_folder

TEXTS = {
    f"text {i}": f"def f{i}(self, x):\n    return x + {i}\n\nThe key of line {i} is a word.\n" * 9 for i in range(40)
}
PHASE = Phase("x", "dense", 1, 4, 128)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return Tokenizer.from_file(str(trained_folder() / "tokenizer.json"))


@pytest.fixture(scope="module")
def documents() -> Documents:
    return documents_of(TEXTS, seed=3)


def pieces(tokenizer: Any, text: str) -> list[str]:
    return tokenizer.encode(text, add_special_tokens=False).tokens


def test_numbers_are_groups_of_two_digits(tokenizer: Any) -> None:
    space = "\u0120"
    assert pieces(tokenizer, "key 4821 is 97") == ["key", f"{space}48", "21", f"{space}is", f"{space}97"]
    assert pieces(tokenizer, "What is key 0099?") == ["What", f"{space}is", f"{space}key", f"{space}00", "99", "?"]
    assert pieces(tokenizer, "482") == ["48", "2"] and pieces(tokenizer, "x=7") == ["x", "=", "7"]
    for number in range(10_000):
        ids = tokenizer.encode(f" {number:04}", add_special_tokens=False).ids
        assert len(ids) == 2
    assert tokenizer.encode("x").ids[0] == 0  # begins with the first special token


@pytest.mark.parametrize(
    "text", ["a\n\n  b\n", "\n    def f(self):\n", "key 1 is\n\n", "\u00e9\u6df1\n \U0001f389", "  \n \n"]
)
def test_a_text_is_its_lines_put_together_and_round_trips(tokenizer: Any, text: str) -> None:
    by_line = [piece for line in text.splitlines(keepends=True) for piece in pieces(tokenizer, line)]
    assert by_line == pieces(tokenizer, text)
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_what_is_written_is_what_the_tokenizer_makes_of_its_text(tokenizer: Any, documents: Documents) -> None:
    tokens = conversation(documents, 1024, 1, questions=5).tokens
    text = tokenizer.decode(tokens, skip_special_tokens=False)
    assert tokenizer.encode(text, add_special_tokens=False).ids == tokens


def test_a_batch_depends_on_seed_and_step_only(documents: Documents) -> None:
    one, same, other = (documents.batch(step, PHASE) for step in (7, 7, 8))
    for name in ("tokens", "positions", "weights", "sources"):
        assert np.array_equal(getattr(one, name), getattr(same, name))
    assert not np.array_equal(one.tokens, other.tokens)
    assert one.tokens.shape == (4, 128) and (np.diff(one.positions) >= 1).all() and (one.positions[:, 0] == 0).all()
    jumps = np.diff(documents.batch(7, replace(PHASE, batch=64, plain=0.0)).positions) > 1
    assert jumps.any() and not np.diff(documents.batch(7, replace(PHASE, jumps=False)).positions).max() > 1


def test_sources_say_where_a_token_stood_before(documents: Documents) -> None:
    phase = Phase("x", "dense", 1, 16, 256, plain=0.0, restate=0.3, spacing=(8.0, 20.0))
    batch = documents.batch(1, phase)
    rows, columns = np.nonzero(batch.sources >= 0)
    assert len(rows) > 300
    assert (batch.sources[rows, columns] < columns).all()
    assert (batch.tokens[rows, columns] == batch.tokens[rows, batch.sources[rows, columns]]).all()
    assert (batch.sources[batch.weights == ANSWER] >= 0).all() and batch.asked.sum() > 100
    guides = guides_of(batch, mtp_layer=3)
    wanted = guides[1][0].numpy()  # query t is asked for token t + 1
    assert (wanted[:, :-1][batch.asked[:, 1:]] == batch.sources[:, 1:][batch.asked[:, 1:]]).all()
    assert (guides[0][1].numpy()[:, 2:] == np.arange(254)).all() and (guides[0][1].numpy()[:, :2] == -1).all()
    assert guides[3][0].shape == (16, 255)


def test_facts_have_different_keys_that_share_halves() -> None:
    for seed in range(20):
        keys = [key for key, _ in draw_facts(np.random.default_rng(seed), 60)]
        assert len(set(keys)) == len(keys) == 60 and all(0 <= key < 10_000 for key in keys)
    shared = [len({key // 100 for key, _ in draw_facts(np.random.default_rng(seed), 60)}) for seed in range(20)]
    assert min(shared) < 20 < max(shared)  # hard documents and easy ones


def test_a_conversation_asks_at_every_depth(documents: Documents, tokenizer: Any) -> None:
    made, same = (conversation(documents, 2048, 5) for _ in range(2))
    assert made == same and sorted(int(depth * 10) for depth in made.depths) == list(range(10))
    assert made.tokens[2047] == documents.writer.newline and made.tokens[2048] != documents.writer.newline
    document = tokenizer.decode(made.tokens[:2048])
    assert all(tokenizer.decode([made.tokens[i] for i in answer][:-1]) in document for answer in made.answers)
    with pytest.raises(ValueError, match="too few"):
        conversation(documents, 256, 5)
