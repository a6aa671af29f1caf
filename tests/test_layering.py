"""Which module may import which, by the imports of every file, read without running it."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Container, Iterator, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("dsa_engine", "kernels", "parallel", "scripts", "tests")

# From the top: a module imports from its own row and the rows below it. A room's row is that of all its modules but
# those with another row.
LAYERS = (
    ("__main__",),
    ("cli",),
    ("commands",),
    ("measure",),
    ("commands.arguments", "server", "weights.convert"),
    ("llm",),
    ("weights.model_folder",),
    ("demo",),
    ("engine.startup",),
    ("engine.disaggregation",),
    ("engine",),
    ("engine.speculation",),
    ("engine.sampling",),
    ("engine.steps",),
    ("engine.cache", "engine.requests"),
    ("model",),
    ("weights.formats",),
    ("options", "text", "weights"),
    ("sampling_params",),
    ("inputs", "outputs"),
    ("system",),
    ("parallel",),
    ("config",),
    ("errors", "reference", "version"),
    ("kernels",),
)
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
LEVEL["__init__"] = -1  # dsa_engine itself: it exports LLM, so it stands above everything

# The two folders at the top of the repository use these packages only, and of ours only the rooms in USES.
STANDALONE = {"kernels": {"torch", "triton", "flash_attn", "flash_attn_interface"}, "parallel": {"torch"}}
USES = {"kernels": {"kernels"}, "parallel": {"parallel", "config", "kernels"}}

# Packages that lie beside the scripts and the tests, and that nothing installed may import.
BESIDE = {
    path.parent.name
    for folder in ("scripts", "scripts/studies", "scripts/kernel_bench", "tests/support")
    for path in (ROOT / folder).glob("*/__init__.py")
}


def python_files() -> Iterator[Path]:
    """Every Python file once: symbolic links (dsa_engine/kernels, dsa_engine/parallel) are not followed."""
    for folder in FOLDERS:
        for where, folders, names in os.walk(ROOT / folder):
            folders[:] = [name for name in folders if name != "__pycache__"]
            yield from (Path(where, name) for name in sorted(names) if name.endswith(".py"))


def module_name(path: Path) -> str:
    """The dotted import name; a package ends in ``.__init__``."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(("dsa_engine", *parts) if parts[0] in STANDALONE else parts)


def imports(source: str, module: str) -> Iterator[tuple[int, str]]:
    """(line, absolute dotted name) of each import, also inside functions and ``if TYPE_CHECKING``."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = module.split(".")[: -node.level] if node.level else []
            base += node.module.split(".") if node.module else []
            # `from dsa_engine import x`: x may be a module, and tells more than its package.
            yield from ((node.lineno, ".".join([*base, alias.name])) for alias in node.names)


def unit(name: str) -> str:
    """The entry of LAYERS that a dotted name under dsa_engine belongs to: ``dsa_engine.LLM`` is the package itself."""
    parts = name.split(".")[1:]
    if not parts or not exists(parts[0]):
        return "__init__"
    return next((module for module in (".".join(parts[:3]), ".".join(parts[:2])) if module in LEVEL), parts[0])


def exists(part: str) -> bool:
    return (ROOT / "dsa_engine" / part).is_dir() or (ROOT / "dsa_engine" / f"{part}.py").is_file()


def violations(source: str, module: str) -> list[str]:
    """The rules that the imports of one file break, one sentence each."""
    broken = []
    in_package = module.startswith("dsa_engine.")
    own = unit(module) if in_package else ""
    if in_package and own not in LEVEL:
        return [f"dsa_engine.{own} has no layer: add it to LAYERS of tests/test_layering.py"]
    for line, name in imports(source, module):
        where = f"{module}, line {line}: imports {name}"
        top = name.split(".")[0]
        if top in STANDALONE:
            broken.append(f"{where}; the name is dsa_engine.{top} (`{top}` belongs to another package)")
        elif not in_package:
            continue
        elif top in BESIDE:
            broken.append(f"{where}, which is not installed")
        elif top == "dsa_engine":
            target = unit(name)
            if own in STANDALONE and target not in USES[own]:
                broken.append(f"{where}; {own} uses nothing of the engine but {_listed(USES[own])}")
            elif target not in LEVEL:
                broken.append(f"{where}; dsa_engine.{target} has no layer: add it to LAYERS of tests/test_layering.py")
            elif LEVEL[target] < LEVEL[own]:
                broken.append(f"{where}, which stands above it")
        elif own in STANDALONE and top not in STANDALONE[own] and top not in sys.stdlib_module_names:
            broken.append(f"{where}; {own} may use the standard library and {', '.join(sorted(STANDALONE[own]))}")
    return broken


def _listed(rooms: set[str]) -> str:
    *first, last = sorted(rooms)
    return f"{', '.join(first)} and {last}" if first else last


def circle(files: Sequence[Path]) -> list[str]:
    """Modules that import each other in a circle, in order; empty if there is no circle."""
    sources = {module_name(path): path.read_text(encoding="utf-8") for path in files}
    uses = {}
    for module, text in sources.items():
        if not module.endswith(".__init__"):
            names = {_module(name, sources) for _, name in imports(text, module)}
            uses[module] = sorted(name for name in names if name and name != module)
    finished: set[str] = set()

    def visit(module: str, path: list[str]) -> list[str]:
        if module in path:
            return [*path[path.index(module) :], module]
        if module not in finished:
            for used in uses.get(module, ()):
                if ring := visit(used, [*path, module]):
                    return ring
            finished.add(module)
        return []

    return next((ring for module in uses if (ring := visit(module, []))), [])


def _module(name: str, modules: Container[str]) -> str | None:
    """The module that an imported name is, or is a part of."""
    return next((part for part in (name, name.rpartition(".")[0]) if part in modules), None)


def test_no_modules_import_each_other() -> None:
    """Inside a room too, where the layers say nothing. Imports inside functions and those for types count."""
    assert circle(list(python_files())) == []


def test_the_tree_keeps_its_layers() -> None:
    files = list(python_files())
    assert any(module_name(path).startswith("dsa_engine.kernels.") for path in files)
    broken = [line for path in files for line in violations(path.read_text(encoding="utf-8"), module_name(path))]
    assert not broken, "\n" + "\n".join(broken)


def test_a_room_of_the_package_has_few_modules() -> None:
    rooms = Counter(str(path.parent.relative_to(ROOT)) for path in python_files() if "tests" not in path.parts)
    limits = {"dsa_engine": 10, "dsa_engine/engine": 5}
    assert {room: count for room, count in rooms.items() if count > limits.get(room, 14)} == {}


@pytest.mark.parametrize(
    "module, heavy",
    [
        ("dsa_engine", ("torch._dynamo", "transformers")),  # more than all else together, in every process of a run
        ("dsa_engine.server.http", ("torch", "transformers")),  # an HTTP process computes nothing
        ("dsa_engine.server.process", ("transformers", "fastapi", "uvicorn")),  # the engine's process speaks no HTTP
    ],
)
def test_importing_takes_little_time(module: str, heavy: tuple[str, ...]) -> None:
    command = f"import sys, {module}; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"
