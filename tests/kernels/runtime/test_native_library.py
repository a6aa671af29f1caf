"""Only a whole library that no other user could have written is loaded and run."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest

from dsa_engine.kernels.runtime import native_library

pytestmark = pytest.mark.skipif(not any(map(shutil.which, ("g++", "c++", "clang++"))), reason="needs a C++ compiler")


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """Sources of one function, which are compiled in half a second."""
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "one.cpp").write_text('extern "C" long one() { return 1; }\n')
    return folder


@pytest.fixture
def folder(sources: Path, tmp_path: Path) -> Path:
    """A folder with the library."""
    folder = tmp_path / "cache" / "native"
    assert native_library.load(sources, folder).one() == 1
    return folder


def library_in(folder: Path) -> Path:
    (library,) = folder.glob("*.so")
    return library


def test_a_damaged_library_is_made_again(sources: Path, folder: Path, tmp_path: Path) -> None:
    """Without a check, the loader maps a file of half the length and dies of SIGBUS."""
    whole = library_in(folder).read_bytes()
    middle = len(whole) // 2
    flipped = whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :]
    for content in (b"", b"half of a library", whole[:20], whole[:4096], whole[:middle], whole[:-1], flipped):
        library_in(folder).unlink()  # the loaded one stays as it is
        (folder / "again").write_bytes(content)
        (folder / "again").replace(folder / native_name(sources))
        assert native_library.load(sources, folder).one() == 1
        assert library_in(folder).stat().st_size == len(whole)


def native_name(sources: Path) -> str:
    return f"kernels-{native_library.digest(sources)}.so"


@pytest.mark.parametrize("what", ["folder", "parent", "file"])
@pytest.mark.parametrize("mode", [0o775, 0o757, 0o777])
def test_what_others_may_write_is_not_loaded(what: str, mode: int, sources: Path, folder: Path) -> None:
    path = {"folder": folder, "parent": folder.parent, "file": library_in(folder)}[what]
    path.chmod(mode)
    with pytest.raises(RuntimeError, match=rf"other users may write to {path}, .* chmod go-w it"):
        native_library.load(sources, folder)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give files away")
@pytest.mark.parametrize("what", ["folder", "parent", "file"])
def test_what_belongs_to_another_user_is_not_loaded(what: str, sources: Path, folder: Path) -> None:
    path = {"folder": folder, "parent": folder.parent, "file": library_in(folder)}[what]
    os.chown(path, 12345, -1)
    with pytest.raises(RuntimeError, match=rf"{path} belongs to another user \(12345\).* DSA_ENGINE_CACHE"):
        native_library.load(sources, folder)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give files away")
def test_users_may_share_a_cache_folder(
    sources: Path, folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What another user has made is not run; it does not keep this one from making a library elsewhere."""
    caplog.set_level("INFO")
    shared = folder.parent
    shared.chmod(0o1777)
    os.chown(folder, 12345, -1)
    mine = shared / "native-0"
    assert native_library.load(sources, folder, mine).one() == 1
    assert library_in(mine).stat().st_uid == 0 and library_in(folder).exists()
    assert f"the CPU kernels are in {mine}: {folder} belongs to another user (12345)" in caplog.text
    os.chown(shared, 12345, -1)  # its owner could replace every folder in it
    at_home = tmp_path / "home" / "native"
    assert native_library.load(sources, folder, mine, at_home).one() == 1
    assert library_in(at_home)


def test_a_library_that_is_there_goes_before_a_new_one(sources: Path, folder: Path, tmp_path: Path) -> None:
    first = tmp_path / "first" / "native"
    assert native_library.load(sources, first, folder).one() == 1
    assert not first.exists()


def test_a_folder_may_lie_in_one_like_tmp(sources: Path, folder: Path) -> None:
    """In a sticky folder other users cannot replace what is not theirs."""
    folder.parent.chmod(0o1777)
    assert native_library.load(sources, folder).one() == 1


def test_links_are_not_followed(sources: Path, folder: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.write_text("content")
    name = library_in(folder).name
    library_in(folder).unlink()
    (lock,) = folder.glob("*.lock")
    lock.unlink()
    lock.symlink_to(mine)
    with pytest.raises(OSError, match="symbolic links"):
        native_library.load(sources, folder)
    lock.unlink()
    (folder / name).symlink_to(mine)
    assert native_library.load(sources, folder).one() == 1 and not (folder / name).is_symlink()
    assert mine.read_text() == "content"


def test_what_a_killed_compilation_left_is_removed(sources: Path, folder: Path) -> None:
    library = library_in(folder)
    stale = folder / f"{library.stem}.unfinished-x"
    stale.mkdir()
    (stale / "one.o").write_text("half")
    library.unlink()
    assert native_library.load(sources, folder).one() == 1
    assert sorted(path.suffix for path in folder.iterdir()) == [".lock", ".so"]


def test_without_a_compiler_a_library_that_is_there_serves(
    sources: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert native_library.load(sources, folder).one() == 1
    folder.chmod(0o777)
    with pytest.raises(RuntimeError, match="other users may write"):
        native_library.load(sources, folder)
    folder.chmod(0o755)
    library_in(folder).write_bytes(b"damaged")
    with pytest.raises(native_library.NoCompiler, match="install g"):
        native_library.load(sources, folder)


def test_a_library_that_is_there_needs_no_writing(sources: Path, folder: Path) -> None:
    (lock,) = folder.glob("*.lock")
    lock.unlink()
    before = folder.stat().st_mtime_ns
    time.sleep(0.01)
    assert native_library.load(sources, folder).one() == 1
    assert folder.stat().st_mtime_ns == before
