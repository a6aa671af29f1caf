"""Builds and installs, from the tree and from the source distribution: the right files, the right names."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
OTHERS = ("kernels", "parallel", "tests", "scripts")  # our top-level folders that must not be installed as such


def run(*command: str | Path, cwd: Path) -> str:
    """Runs a command and returns what it printed; its output is the failure's message."""
    line = [str(part) for part in command]
    done = subprocess.run(line, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, f"{' '.join(line)}\n{done.stdout}"
    return done.stdout


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the checkout as git sees it: tracked and new files, links as links, nothing that is ignored. Its name
    is that of a clone, and of the package."""
    copy = tmp_path_factory.mktemp("tree") / "dsa_engine"
    listed = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=ROOT)
    for name in filter(None, set(listed.split("\0"))):
        source, target = ROOT / name, copy / name
        if source.is_symlink() or source.exists():  # git still lists a file that was just deleted
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target, follow_symlinks=False)
    return copy


@pytest.fixture(scope="module")
def wheels(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A wheel built from the tree, and one built from the source distribution."""
    wheels = {}
    # In this order: a build leaves lists of files in the tree, which must not help the source distribution.
    for origin, options in {"sdist": [], "tree": ["--wheel"]}.items():
        out = tmp_path_factory.mktemp(f"dist-{origin}")
        run(sys.executable, "-m", "build", "--no-isolation", *options, "--outdir", out, tree, cwd=out)
        (wheels[origin],) = out.glob("*.whl")
    return wheels


@pytest.mark.parametrize("origin", ["tree", "sdist"])
def test_a_wheel_holds_the_package_and_nothing_else(wheels: dict[str, Path], tree: Path, origin: str) -> None:
    wheel = wheels[origin]
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (info,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        metadata = archive.read(info).decode()
        commands = archive.read(info.replace("METADATA", "entry_points.txt")).decode()

    expected = {"dsa_engine/py.typed"}
    expected |= {path.relative_to(tree).as_posix() for path in (tree / "dsa_engine" / "demo_model").iterdir()}
    assert "dsa_engine/demo_model/model.safetensors" in expected
    expected |= {f"dsa_engine/server/page/{path.name}" for path in (tree / "dsa_engine" / "server" / "page").iterdir()}
    assert "dsa_engine/server/page/index.html" in expected
    expected |= {f"dsa_engine/kernels/cpu/{path.name}" for path in (tree / "kernels" / "cpu").iterdir()}
    assert "dsa_engine/kernels/cpu/tiles.h" in expected
    for folder, prefix in (("dsa_engine", ""), ("kernels", "dsa_engine/"), ("parallel", "dsa_engine/")):
        expected |= {prefix + path.relative_to(tree).as_posix() for path in (tree / folder).rglob("*.py")}
    packed = {name for name in names if ".dist-info/" not in name}
    assert packed == expected
    assert any(name.startswith("dsa_engine/kernels/") for name in packed)
    assert any(name.startswith("dsa_engine/parallel/") for name in packed)
    assert any(name.endswith("/licenses/LICENSE") for name in names)
    assert "Requires-Python: >=3.10" in metadata
    assert "dsa-engine = dsa_engine.cli:main" in commands


def installed(folder: Path, *what: str | Path) -> tuple[Path, Path]:
    """Installs something into a new environment; its interpreter and its folder of packages."""
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder.parent)
    python = folder / "bin" / "python"
    # The dependencies are those of this environment. A folder added by a .pth file comes last on sys.path, and its own
    # .pth files (an editable install of dsa_engine) are not read, so what was just installed is what is imported.
    site = Path(run(python, "-Ic", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).strip())
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    install = ("install", "--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--ignore-installed", *what)
    if what:
        run(sys.executable, "-m", "pip", "--python", python, *install, cwd=folder)
    return python, site


IMPORTED = (
    "import importlib.metadata, dsa_engine, dsa_engine.kernels, dsa_engine.parallel\n"
    "from dsa_engine.version import __version__\n"
    "assert importlib.metadata.version('dsa-engine') == dsa_engine.__version__ == __version__\n"
    "print(dsa_engine.__file__, dsa_engine.kernels.__file__, dsa_engine.parallel.__file__, sep='\\n')\n"
)


@pytest.mark.parametrize("origin", ["tree", "sdist"])
def test_an_installed_wheel_is_imported_under_our_name_only(
    wheels: dict[str, Path], tree: Path, origin: str, tmp_path: Path
) -> None:
    python, site = installed(tmp_path / "venv", wheels[origin])
    for cwd in (tmp_path, tree.parent):  # the folder that holds the clone too
        for line in run(python, "-c", IMPORTED, cwd=cwd).splitlines():
            assert Path(line).is_relative_to(site), line
    for name in OTHERS:
        assert not (site / name).exists()
    assert_not_ours(python, tmp_path, site, ROOT)


def test_an_editable_install_is_imported_from_anywhere(tree: Path, tmp_path: Path) -> None:
    """In the folder that holds a clone named dsa_engine, ``import dsa_engine`` found the clone: an empty package."""
    python, _ = installed(tmp_path / "venv", "--editable", tree)
    for cwd in (tree, tree.parent, tmp_path):
        for line in run(python, "-c", IMPORTED, cwd=cwd).splitlines():
            assert Path(line).resolve().is_relative_to(tree), line
        assert run(python, "-m", "dsa_engine", "--version", cwd=cwd).startswith("dsa_engine ")
    for module in ("kernels", "parallel"):
        assert_not_ours(python, tmp_path, tree / module)


def test_the_interpreter_of_the_tests_sees_no_top_level_kernels(tmp_path: Path) -> None:
    """Holds for an editable install too: it must not put the checkout's folder on sys.path."""
    assert_not_ours(Path(sys.executable), tmp_path, ROOT / "kernels", ROOT / "parallel")


def assert_not_ours(python: Path, cwd: Path, *folders: Path) -> None:
    """``kernels`` and ``parallel`` are unknown to ``python``, or another package's: absent from ``folders``."""
    program = (
        "import importlib.util as u\n"
        "for name in ('kernels', 'parallel'):\n"
        "    spec = u.find_spec(name)\n"
        "    print(*(spec.submodule_search_locations or [spec.origin]) if spec else (), sep='\\n')\n"
    )
    for line in filter(None, run(python, "-Ic", program, cwd=cwd).splitlines()):
        assert not any(Path(line).resolve().is_relative_to(folder.resolve()) for folder in folders), line
