"""The rooms of the kernels: which may import which, and one operation a file."""

from __future__ import annotations

import ast
import re
from pathlib import Path

KERNELS = Path(__file__).resolve().parents[2] / "kernels"
# From the bottom: a room imports from itself and from earlier rows.
LOWER = (("runtime",), ("formats",), ("rows",), ("grouped",))
ROOMS = (*LOWER, ("attention", "indexer", "linear"), ("moe",), ("libraries",))
LEVEL = {room: level for level, rooms in enumerate(ROOMS) for room in rooms}
FILES = [path for path in sorted(KERNELS.rglob("*.py")) if path.parent != KERNELS]


def test_every_file_is_in_a_room() -> None:
    assert [path.name for path in KERNELS.glob("*.py")] == ["__init__.py"]
    assert {path.parent.name for path in FILES} == set(LEVEL)


def test_rooms_import_what_is_below_them() -> None:
    wrong = []
    for path in FILES:
        own = path.parent.name
        for room, module in re.findall(
            r"^\s*from dsa_engine\.kernels\.(\w+)(?:\.(\w+))? import", path.read_text(), re.M
        ):
            private = module.startswith("_") and room != own
            if LEVEL[room] > LEVEL[own] or (LEVEL[room] == LEVEL[own] and room != own) or private:
                wrong.append(f"{own}/{path.name} imports {room}.{module}")
    assert wrong == []


def test_a_file_has_one_operation() -> None:
    """A file whose name begins with an underscore serves its room and has none."""
    for path in FILES:
        functions = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)]
        operations = [
            node.name for node in functions if any("operation" in ast.unparse(mark) for mark in node.decorator_list)
        ]
        assert len(operations) <= (0 if path.name.startswith("_") else 1), f"{path.name}: {operations}"
