"""Tokens to text, piece by piece: unfinished characters and possible stop strings are held back."""

from __future__ import annotations

import json
import logging
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsa_engine.demo import demo_folder
from dsa_engine.text.conversations import ConversationFormat
from dsa_engine.text.tokenizer import TextStream, Tokenizer


class Bytes:
    """A tokenizer whose tokens are bytes, of which it may tell."""

    def __init__(self, joins_bytes: bool = True):
        self.joins_bytes = joins_bytes

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return bytes(ids).decode("utf-8", errors="replace")


class Pieces:
    """A tokenizer whose tokens are strings of any length; a space at the beginning of a text is lost, as in Llama's."""

    joins_bytes = False

    def __init__(self, pieces: list[str]):
        self.pieces = pieces

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return "".join(self.pieces[i] for i in ids).removeprefix(" ")


def run(tokenizer: Any, tokens: list[int], stop: tuple[str, ...]) -> tuple[list[str], str, bool]:
    """The pieces that come, joined too, and whether it stopped (the rest of the tokens is then not given)."""
    stream = TextStream(tokenizer, stop)
    pieces = []
    for token in tokens:
        stream.add(token)
        if stream.stop_string is not None:
            break
        pieces.append(stream.new_text())
    stream.finish()
    pieces.append(stream.new_text())
    return pieces, "".join(pieces), stream.stop_string is not None


def test_characters_of_several_tokens() -> None:
    pieces, text, stopped = run(Bytes(), list("aé€😀z".encode()), ())
    assert pieces == ["a", "", "é", "", "", "€", "", "", "", "😀", "z", ""]
    assert (text, stopped) == ("aé€😀z", False)


def test_an_unfinished_character_at_the_end_is_shown_as_it_stands() -> None:
    pieces, text, _ = run(Bytes(), list("ab€".encode())[:-1], ())
    assert text == "ab\ufffd" and "".join(pieces) == text and pieces[:4] == ["a", "b", "", ""]


def test_spaces_between_words_survive() -> None:
    tokenizer = Pieces([" Hello", " world", " and", " all"])
    pieces, text, _ = run(tokenizer, [0, 1, 2, 3], ())
    assert text == "Hello world and all" and pieces[:4] == ["Hello", " world", " and", " all"]


@pytest.mark.parametrize(
    "text, stop, expected, pieces",
    [
        ("one END two", ("END",), "one ", ["o", "n", "e", " ", "", "", ""]),
        ("EEND", ("END",), "E", ["", "E", "", ""]),
        ("abcabd", ("abd",), "abc", ["", "", "abc", "", "", ""]),
        ("xaby", ("ab", "b"), "x", ["x", "", ""]),
        ("the en", ("end",), "the en", ["t", "h", "", "e ", "", "", "en"]),
        ("no stop", (), "no stop", [*"no stop", ""]),
    ],
)
def test_stop_strings_over_several_tokens(text: str, stop: tuple[str, ...], expected: str, pieces: list[str]) -> None:
    streamed, whole, stopped = run(Bytes(), list(text.encode()), stop)
    assert whole == expected and "".join(streamed) == expected
    assert stopped == (expected != text)
    if "e " not in pieces:  # that case is there for its whole text
        assert streamed == pieces


def test_a_stop_string_within_one_token_and_over_a_border() -> None:
    tokenizer = Pieces(["one", " two STOP three", "ST", "OP", "!"])
    assert run(tokenizer, [0, 1, 4], ("STOP",))[1:] == ("one two ", True)
    assert run(tokenizer, [0, 2, 3, 4], ("STOP",))[1:] == ("one", True)
    assert run(tokenizer, [0, 2, 4, 3], ("STOP",))[1:] == ("oneST!OP", False)
    assert run(tokenizer, [0, 1], ("three", "two"))[1:] == ("one ", True)


TEXTS = st.text(st.sampled_from("ab é€😀\ufffd"), max_size=25)
STOPS = st.lists(st.text(st.sampled_from("ab é"), min_size=1, max_size=4), max_size=3).map(tuple)


@given(TEXTS, STOPS)
def test_pieces_join_to_the_text_before_the_first_stop_string(text: str, stop: tuple[str, ...]) -> None:
    pieces, whole, stopped = run(Bytes(), list(text.encode()), stop)
    # The stop string that is complete first ends the text; where it begins, the text is cut.
    expected = text
    for end in range(len(text) + 1):
        starts = [text[:end].find(s) for s in stop if s in text[:end]]
        if starts:
            expected = text[: min(starts)]
            break
    assert whole == expected and stopped == (expected != text)
    assert "".join(pieces) == whole


@given(st.lists(st.integers(0, 255), max_size=30), STOPS, st.booleans())
def test_any_bytes(tokens: list[int], stop: tuple[str, ...], joins_bytes: bool) -> None:
    """The bytes of an untrained model, which are no text: a piece that was given never changes."""
    pieces, whole, stopped = run(Bytes(joins_bytes), tokens, stop)
    assert "".join(pieces) == whole
    assert bytes(tokens).decode("utf-8", errors="replace").startswith(whole)
    if not stopped:
        assert whole == bytes(tokens).decode("utf-8", errors="replace")
        assert not any(s in whole for s in stop) or whole.endswith("\ufffd")


@pytest.mark.parametrize("byte", [0x80, 0xE2, 0xFF])
def test_tokens_that_never_complete_a_character(byte: int) -> None:
    """The work for a token does not grow with those before it, and what can no longer change is given."""
    decoded: list[int] = []

    class Counted(Bytes):
        def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
            decoded.append(len(ids))
            return super().decode(ids)

    tokens = [*b"text ", *[byte] * 500, *"€".encode()]
    pieces, whole, _ = run(Counted(), tokens, ())
    assert whole == bytes(tokens).decode("utf-8", errors="replace") == "".join(pieces)
    assert max(decoded) < 40 and sum(len(piece) for piece in pieces[:400]) > 350


def test_a_stream_of_byte_level_tokens_decodes_each_alone(demo_tokenizer: Tokenizer) -> None:
    """So that a token which came before costs no more than a look-up."""
    assert demo_tokenizer.joins_bytes
    ids = demo_tokenizer.encode("the same words, the same words", add_special_tokens=False)
    seen: list[list[int]] = []
    stream = TextStream(demo_tokenizer)
    stream._decode = lambda tokens: seen.append(tokens) or demo_tokenizer.decode(tokens)  # type: ignore[assignment]
    for token in ids:
        stream.add(token)
    assert seen == [[token] for token in ids] and stream.new_text() == "the same words, the same words"


@pytest.fixture(scope="module")
def demo_tokenizer(demo_cache: Path) -> Tokenizer:
    return Tokenizer(demo_folder())


def test_demo_tokenizer_streams_what_it_decodes(demo_tokenizer: Tokenizer) -> None:
    text = "Grüße, 世界! 😀 def f(x):\n\treturn x"
    ids = demo_tokenizer.encode(text)
    assert demo_tokenizer.decode(ids) == text
    assert len(ids) == 1 + len(text.encode())  # the begin-of-sentence token, and a token a byte
    pieces, whole, _ = run(demo_tokenizer, ids, ())
    assert whole == text and "".join(pieces) == text
    assert run(demo_tokenizer, ids, ("界!",))[1:] == ("Grüße, 世", True)


def test_chat(demo_tokenizer: Tokenizer) -> None:
    ids = ConversationFormat(demo_tokenizer).token_ids([{"role": "user", "content": "Hi"}])
    assert ids[0] == 0 and ids.count(0) == 1, "the template writes the first token, and nothing writes it again"
    assert ids == [0, 2, *demo_tokenizer.encode("Hi")[1:], 3]


def test_no_second_beginning(demo_tokenizer: Tokenizer) -> None:
    """A text that begins with the token that begins every text, as a rendered conversation does."""
    begin, encode = demo_tokenizer.hf.bos_token, demo_tokenizer.encode
    once = encode("ab")
    assert encode(f"{begin}ab") == once == [0, *encode("ab", add_special_tokens=False)]
    assert encode(f"{begin}{begin}ab") == [0, *once]
    assert encode(f"a{begin}b").count(0) == 2


def test_a_long_text_has_no_warning_of_another_library(
    demo_tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine says what is too long, and how long it may be."""
    hf = Tokenizer(demo_tokenizer.folder).hf
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    assert len(Tokenizer(demo_tokenizer.folder).encode("a key " * 100_000)) > hf.model_max_length
    assert not caplog.records


def test_half_a_surrogate_pair(demo_tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match="surrogate pair.* index 2"):
        demo_tokenizer.encode("ab\ud83d")


def test_a_panic_is_an_error(tmp_path: Path, demo_cache: Path) -> None:
    """A panic in the library's Rust code is no ``Exception``; the next call works."""
    for path in demo_folder().glob("tokenizer*"):
        shutil.copy(path, tmp_path)
    keys = json.loads((tmp_path / "tokenizer.json").read_text())
    backtracking = {"type": "Split", "pattern": {"Regex": "(x+x+)+y"}, "behavior": "Isolated", "invert": False}
    keys["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [backtracking, keys["pre_tokenizer"]]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(keys))
    tokenizer = Tokenizer(tmp_path)
    with pytest.raises(ValueError, match="cannot encode the text: PanicException"):
        tokenizer.encode("x" * 4000)
    assert tokenizer.decode(tokenizer.encode("ab"), skip_special_tokens=True) == "ab"


def test_a_folder_may_not_run_its_own_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does transformers ask on stdin: a pipe with the prompt might hold a "y"."""
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("transformers asked on stdin"))
    config = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "config.json").write_text('{"model_type": "deepseek_v3"}')
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n\nclass Own:\n    pass\n")
    with pytest.raises(ValueError, match="cannot be read: .*trust_remote_code"):
        Tokenizer(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_a_damaged_tokenizer_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    (tmp_path / "config.json").write_text('{"model_type": "deepseek_v3"}')
    with pytest.raises(ValueError, match=r"^the tokenizer in .* cannot be read: [^\n]*$"):
        Tokenizer(tmp_path)


TWO_THREADS = f"""
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from dsa_engine.engine.sampling.grammar import GrammarMasks
from dsa_engine.text.tokenizer import Tokenizer

folder = Path({str(demo_folder())!r})
grammars = GrammarMasks(folder, False, 512, [0])
with ThreadPoolExecutor(2) as pool:
    made = [grammars.load(), pool.submit(Tokenizer, folder), pool.submit(Tokenizer, folder)]
[one.result() for one in made]
"""


def test_threads_that_import_transformers_first_at_once() -> None:
    """As grammars are loaded beside the first call."""
    done = subprocess.run([sys.executable, "-c", TWO_THREADS], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
