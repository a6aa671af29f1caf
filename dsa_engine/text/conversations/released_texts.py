"""The fixed texts of DeepSeek-V3.2's prompts, read from the Python file of the model folder.

The model was trained with a tool prompt and a format prompt that stand in ``encoding/encoding_dsv32.py`` of its folder.
The file is parsed, never run: its constants are taken, and their fields replaced.
"""

from __future__ import annotations

import ast
from functools import lru_cache
from pathlib import Path

FILE = Path("encoding", "encoding_dsv32.py")
TOOLS, RESPONSE_FORMAT = "TOOLS_SYSTEM_TEMPLATE", "response_format_template"


def released_text(folder: Path, constant: str, **fields: str) -> str:
    """The fixed text :data:`TOOLS` or :data:`RESPONSE_FORMAT`, with its fields replaced."""
    path = folder / FILE
    if not path.is_file():
        raise ValueError(
            f"there is no {path}, in which the words stand that tell DeepSeek-V3.2 of tools and response formats; get "
            "the file with the model, or leave tools and response_format out"
        )
    try:
        return _constant(path, constant).format(**fields)
    except (OSError, ValueError, SyntaxError, LookupError) as error:
        raise ValueError(f"{path} is not as released ({type(error).__name__}: {error}); get the file again") from error


@lru_cache(maxsize=16)
def _constant(path: Path, name: str) -> str:
    for node in ast.parse(path.read_bytes()).body:
        if not isinstance(node, (ast.Assign, ast.AnnAssign)) or node.value is None:
            continue
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            value = ast.literal_eval(node.value)
            if isinstance(value, str):
                return value
    raise ValueError(f"it has no text {name}")
