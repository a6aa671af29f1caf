"""Words that are not used, held for every Python file: names, docstrings and comments.

Texts avoid further ones: behind (after), ends, share (offsets, fraction, part), stands for, of its own, so many, beside
(represents, own, the number, with or while), machine, halves, observer (node, micro-batches, hook), choices, served,
live (``topk_ids`` or token-expert pairs, local pairs, ``token_mask``), and kept, found, left, read, taken and known as
nouns (the thing itself).
"""

from __future__ import annotations

import ast
import io
import keyword
import os
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("dsa_engine", "kernels", "parallel", "scripts", "tests", "benchmarks")

# Not to be parts of a name: a maximum is `max`, a position is a `row`, an `index` or a `slot`.
PARTS = {"most", "place", "places", "behind", "verified", "nobody", "somebody", "everybody", "everybodys", "whoever"}
# As a whole name: these say neither of what nor which.
WHOLE = {"ends", "share", "shares", "left", "kept", "found"}
USUAL = re.compile("at_most|in_place", re.IGNORECASE)
# A rank, a request, a thread, a caller is called that.
PEOPLE = re.compile(r"\b(?:some|any|every|no)body\b|\bwho(?:ever)?\b", re.IGNORECASE)


def python_files() -> Iterator[Path]:
    for folder in FOLDERS:
        for where, folders, names in os.walk(ROOT / folder):
            folders[:] = sorted(name for name in folders if name != "__pycache__")
            yield from (Path(where, name) for name in sorted(names) if name.endswith(".py"))


def parts_of(name: str) -> list[str]:
    """The words of a name, in small letters: max_tokens, MaxTokens and MAX_TOKENS have the same ones."""
    return [part.lower() for part in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", name)]


def bad_words(source: str) -> list[str]:
    bad = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.NAME and not keyword.iskeyword(name := token.string):
            if name in WHOLE or PARTS & set(parts_of(USUAL.sub("", name))):
                bad.append(f"{token.start[0]}: the name {name}")
        elif token.type == tokenize.COMMENT:
            bad += [f"{token.start[0]}: {match} in a comment" for match in PEOPLE.findall(token.string)]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = ast.get_docstring(node) or ""
            bad += [f"{match} in the docstring '{text[:40]}'" for match in PEOPLE.findall(text)]
    return bad


def test_words_are_the_glossarys() -> None:
    bad = {str(path.relative_to(ROOT)): bad_words(path.read_text()) for path in python_files()}
    assert {path: lines for path, lines in bad.items() if lines} == {}
