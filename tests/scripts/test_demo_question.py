"""The question of scripts/demo.py: that of the text itself, or one for a fact that is added."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest

from demo import Question, question
from dsa_engine.demo import trained_folder
from dsa_engine.text.conversations import ConversationFormat
from dsa_engine.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(trained_folder())


def asked(tokenizer: Tokenizer, folder: Path, text: str, tokens: int = 500) -> Question:
    (folder / "text").write_text(text)
    return question(tokenizer, Namespace(prompt_file=str(folder / "text"), tokens=tokens, depth=0.3))


def test_a_text_with_its_own_question(tokenizer: Tokenizer, tmp_path: Path) -> None:
    text = "import os\nkey 4821 is 97\nkey 0003 is 11\nWhat is key 4821?\n\n"
    one = asked(tokenizer, tmp_path, text)
    assert (one.question, one.fact, one.where) == ("What is key 4821?", "key 4821 is 97", "in line 2 of the text")
    assert one.prompt == ConversationFormat(tokenizer).token_ids([{"role": "user", "content": text.strip()}])
    assert asked(tokenizer, tmp_path, "Nothing here.\nWhy?").fact is None
    with pytest.raises(ValueError, match="takes [0-9]+ tokens with its question; --tokens 9 allows fewer"):
        asked(tokenizer, tmp_path, text, tokens=9)


def test_a_short_text_gets_a_fact(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """It was refused: facts stood after every eighth line."""
    one = asked(tokenizer, tmp_path, "import os\nimport sys\n")
    assert one.fact and one.fact.startswith("key ") and one.where == "after line 2 of the text"
    with pytest.raises(ValueError, match="20 tokens hold 0 lines and no fact"):
        asked(tokenizer, tmp_path, "import os\nimport sys\n" * 20, tokens=20)
