"""The fixed texts of DeepSeek-V3.2's prompts, read from the Python file of the model folder.

The model was trained with a tool prompt and a format prompt that stand in ``encoding/encoding_dsv32.py`` of its folder.
The file is parsed, never run: its constants are taken, and only known fields are replaced in them.
"""

from __future__ import annotations

import ast
from functools import lru_cache
from pathlib import Path
from string import Formatter

FILE = Path("encoding", "encoding_dsv32.py")
LARGEST = 2**18  # bytes; the released file has 14 thousand

TOOLS, RESPONSE_FORMAT = "TOOLS_SYSTEM_TEMPLATE", "response_format_template"
_NEEDED = {TOOLS: "tool_schemas", RESPONSE_FORMAT: "schema"}
_FIELDS = {TOOLS: {"tool_schemas", "dsml_token", "thinking_start_token", "thinking_end_token"}}


def released_text(folder: Path, constant: str, **fields: str) -> str:
    """One of the fixed texts, with its fields replaced.

    Args:
        folder: the model's folder.
        constant: :data:`TOOLS` or :data:`RESPONSE_FORMAT`.
        fields: the text of each field.

    Raises:
        ValueError: there is no such file, or it is too large, no Python, or without this text.
    """
    path = folder / FILE
    if not path.is_file():
        raise ValueError(
            f"there is no {path}, in which the words stand that tell DeepSeek-V3.2 of tools and response formats; get "
            "the file with the model, or leave tools and response_format out"
        )
    status = path.stat()
    if status.st_size > LARGEST:
        raise ValueError(f"{path} has {status.st_size:,} bytes; at most {LARGEST:,} are read. Get the file again")
    pieces = _pieces(path, constant, status.st_mtime_ns)
    return "".join(piece if field is None else piece + fields[field] for piece, field in pieces)


@lru_cache(maxsize=16)
def _pieces(path: Path, constant: str, changed: int) -> list[tuple[str, str | None]]:
    """The pieces of a text, each with the field after it."""
    try:
        pieces = [(text, field) for text, field, *_ in _plain_fields(_constant(path, constant))]
    except (OSError, ValueError, SyntaxError, RecursionError, MemoryError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(f"{path} is not as released: {reason}; get the file again") from None
    fields = {field for _, field in pieces} - {None}
    needed, allowed = _NEEDED[constant], _FIELDS.get(constant, {_NEEDED[constant]})
    if needed not in fields or fields - allowed:
        raise ValueError(
            f"{path} is not as released: the fields of {constant} are {', '.join(sorted(map(str, fields))) or '(none)'}"
            f", not {', '.join(sorted(allowed))}; get the file again"
        )
    return pieces


def _constant(path: Path, name: str) -> str:
    """The text that a module assigns to a name at its top level."""
    for node in ast.parse(path.read_bytes()).body:
        if not isinstance(node, (ast.Assign, ast.AnnAssign)) or node.value is None:
            continue
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            value = ast.literal_eval(node.value)
            if isinstance(value, str):
                return value
    raise ValueError(f"it has no text {name}")


def _plain_fields(text: str) -> list[tuple[str, str | None]]:
    """The pieces of a format text, whose fields must be names: no attributes, widths or conversions."""
    pieces = []
    for piece, field, width, conversion in Formatter().parse(text):
        if width or conversion:
            raise ValueError(f"a field {field!r} with a form")
        pieces.append((piece, field))
    return pieces
