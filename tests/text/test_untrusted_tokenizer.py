"""Tokenizers whose steps fail, panic or multiply a text: each is one clear error of the call that meets it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dsa_engine.demo import demo_folder
from dsa_engine.text import growth
from dsa_engine.text.tokenizer import Tokenizer

Changed = Callable[[dict[str, Any]], Tokenizer]


@pytest.fixture
def changed(demo_cache: Path, tmp_path: Path) -> Changed:
    """``changed(keys)``: the demo model's tokenizer, with other keys in its ``tokenizer.json``."""

    def make(keys: dict[str, Any]) -> Tokenizer:
        for path in demo_folder().glob("tokenizer*"):
            shutil.copy(path, tmp_path)
        path = tmp_path / "tokenizer.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | keys))
        return Tokenizer(tmp_path)

    return make


def replace(pattern: str, content: str, kind: str = "String") -> dict[str, Any]:
    return {"type": "Replace", "pattern": {kind: pattern}, "content": content}


def normalizer(*steps: dict[str, Any]) -> dict[str, Any]:
    return {"normalizer": {"type": "Sequence", "normalizers": [*steps]}}


BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
BACKTRACKING = {"type": "Split", "pattern": {"Regex": "(x+x+)+y"}, "behavior": "Isolated", "invert": False}


def test_a_panic_is_an_error(changed: Changed) -> None:
    """A panic in the library is no ``Exception``; the next call works."""
    strip = {"type": "Strip", "content": " ", "start": 5, "stop": 5}
    tokenizer = changed({"decoder": {"type": "Sequence", "decoders": [BYTES, strip]}})
    (_, space) = tokenizer.encode(" ")
    for call in (lambda: tokenizer.decode([space]), lambda: tokenizer.token_text(space)):
        with pytest.raises(ValueError, match="^the tokenizer in .* cannot decode tokens: PanicException: index out of"):
            call()
    tokenizer = changed({"pre_tokenizer": {"type": "Sequence", "pretokenizers": [BACKTRACKING, BYTES]}})
    for call in (lambda: tokenizer.encode("x" * 4000), lambda: tokenizer.word_ids("x" * 4000)):
        with pytest.raises(ValueError, match="cannot encode the text: PanicException: Onig: Regex search error: retry"):
            call()
    assert tokenizer.decode(tokenizer.encode("ab")) == "ab"


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_is_none(
    changed: Changed, monkeypatch: pytest.MonkeyPatch, interrupt: type[BaseException]
) -> None:
    tokenizer = changed({})

    def interrupted(*_: Any, **__: Any) -> None:
        raise interrupt

    monkeypatch.setattr(tokenizer.hf, "encode", interrupted)
    with pytest.raises(interrupt):
        tokenizer.encode("a")


def test_threads_that_could_not_be_started(changed: Changed, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library would fail in every later call; it is called without threads."""
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")
    tokenizer, encode = changed({}), Tokenizer(demo_folder()).hf.encode

    class PanicException(BaseException):
        pass

    def failing(*args: Any, **named: Any) -> Any:
        import os

        if os.environ["TOKENIZERS_PARALLELISM"] == "true":
            raise PanicException("The global thread pool has not been initialized.: ThreadPoolBuildError")
        return encode(*args, **named)

    monkeypatch.setattr(tokenizer.hf, "encode", failing)
    assert tokenizer.encode("ab") == encode("ab")


TEN = [replace("a", "a" * 10)] * 9
REGEX = [replace("b", "bb", "Regex")] * 9
PREPEND = [{"type": "Prepend", "prepend": "a" * 300}, replace("a", "b" * 300)]
MAP = {"type": "Precompiled", "precompiled_charsmap": ""}


@pytest.mark.parametrize(
    "steps, text, message",
    [
        (TEN, "ab", r"the step Replace of its normalizer may make 1e\+05 characters of 2; at most 50,000 are allowed"),
        (REGEX, "b" * 2000, r"the step Replace of its normalizer may make .* characters of 2,000; at most 50,000"),
        (PREPEND, "c", "the step Replace of its normalizer may make 9e"),
        ([{"type": "Prepend", "prepend": "a" * 60000}], "c", r"the step Prepend of its normalizer may make 1.2e\+05"),
    ],
)
def test_a_normalizer_that_multiplies(
    changed: Changed, monkeypatch: pytest.MonkeyPatch, steps: list[dict[str, Any]], text: str, message: str
) -> None:
    monkeypatch.setattr(growth, "LIMIT", 50_000)
    tokenizer = changed(normalizer(*steps))
    with pytest.raises(ValueError, match=f"^the tokenizer in .* cannot encode the text: {message}"):
        tokenizer.encode(text)


def test_a_normalizer_that_multiplies_something_else(changed: Changed, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounds of the steps alone would refuse these texts; what each step makes of them is short."""
    monkeypatch.setattr(growth, "LIMIT", 50_000)
    steps = [*TEN, {"type": "NFKC"}, replace(" +", " ", "Regex")]
    tokenizer = changed(normalizer({"type": "Sequence", "normalizers": steps}))
    assert tokenizer.decode(tokenizer.encode("bcd  e"), skip_special_tokens=True) == "bcd e"
    assert len(changed({}).encode("x" * 60_000)) == 60_001, "without such steps there is no limit"


def test_a_decoder_that_multiplies(changed: Changed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growth, "LIMIT", 50_000)
    tokenizer = changed({"decoder": {"type": "Sequence", "decoders": [*TEN, BYTES]}})
    with pytest.raises(ValueError, match=r"cannot decode tokens: its decoder may make .* characters of 2; at most 50"):
        tokenizer.decode([68])
    fine = changed({"decoder": {"type": "Sequence", "decoders": [replace("a", "bb"), BYTES]}})
    assert fine.decode(fine.encode("abc"), skip_special_tokens=True) == "bbbc"


@pytest.mark.parametrize(
    "keys, message",
    [
        (
            {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [BYTES] * 9}},
            "its pre_tokenizer makes every text up to 512 times as long; 16 times are allowed",
        ),
        (
            {
                "post_processor": {
                    "type": "TemplateProcessing",
                    "single": [{"Sequence": {"id": "A", "type_id": 0}}] * 40,
                    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
                    "special_tokens": {},
                }
            },
            "its post_processor makes every text up to 40 times as long; 16 times are allowed",
        ),
    ],
)
def test_other_stages_that_multiply(changed: Changed, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^the tokenizer in .* cannot be read: {message}$"):
        changed(keys)


def test_no_second_beginning(changed: Changed) -> None:
    """A text that begins with the token that begins every text, as a rendered conversation does."""
    tokenizer = changed({})
    begin = tokenizer.hf.bos_token
    once = tokenizer.encode("ab")
    assert tokenizer.encode(f"{begin}ab") == once == [0, *tokenizer.encode("ab", add_special_tokens=False)]
    assert tokenizer.encode(f"{begin}{begin}ab") == [0, *once]
    assert tokenizer.encode(f"a{begin}b").count(0) == 2


def test_half_a_surrogate_pair(changed: Changed) -> None:
    with pytest.raises(
        ValueError, match=r"^the text has half a surrogate pair, .*at index 2 \('\\ud83d'\); decode its"
    ):
        changed({}).encode("ab\ud83d")
