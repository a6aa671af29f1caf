"""Tokenizer, documents and cases."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from demo_model.data import ANSWER, Documents
from demo_model.recipe import Phase
from demo_model.training import guides_of
from dsa_engine.demo import trained_folder
from evaluate import conversation

TEXTS = {
    f"text {i}": f"def f{i}(self, x):\n    return x + {i}\n\nThe key of line {i} is a word.\n" * 9 for i in range(40)
}
PHASE = Phase("x", 1, 4, 128)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return Tokenizer.from_file(str(trained_folder() / "tokenizer.json"))


@pytest.fixture(scope="module")
def documents() -> Documents:
    return Documents(TEXTS, seed=3)


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
    phase = Phase("x", 1, 16, 256, plain=0.0, spacing=(8.0, 20.0))
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


def test_a_conversation_asks_at_every_depth(documents: Documents, tokenizer: Any) -> None:
    made, same = (conversation(documents, 2048, 5) for _ in range(2))
    assert made == same and sorted(int(depth * 10) for depth in made.depths) == list(range(10))
    assert made.tokens[2047] == documents.newline and made.tokens[2048] != documents.newline
    document = tokenizer.decode(made.tokens[:2048])
    assert all(tokenizer.decode([made.tokens[i] for i in answer][:-1]) in document for answer in made.answers)
    with pytest.raises(ValueError, match="too few"):
        conversation(documents, 256, 5)
