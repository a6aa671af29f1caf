"""Files of pages: a page comes back as it was written, or not at all, whatever happens to its file and folder."""

from __future__ import annotations

import errno
import os
import random
import resource
from collections.abc import Callable
from itertools import takewhile
from pathlib import Path
from tempfile import gettempdir

import pytest

from dsa_engine.engine.cache.folder import PageFolder, file_bytes, keys, page_path, pages, unfinished
from page_files import KEY, ROOT, SIZES, digest, empty, filled, reads, written


@pytest.mark.parametrize(
    "sizes",
    [(1,), (0, 0), (), SIZES, (3,) * 2500, (0, 1) * 700, (1 << 20, 5, 1 << 19), (2008, 2009, 4016)],
    ids=["byte", "empty", "none", "odd", "many", "many, some empty", "large", "whole sums"],
)
def test_round_trip(sizes: tuple[int, ...], folder: PageFolder, lines: list[str]) -> None:
    written(folder, 0, 1, sizes=sizes)
    assert reads(folder, 0, sizes) and reads(folder, 1, sizes) and not reads(folder, 2, sizes)
    (first, _) = (about for key in keys(folder.folder) for _, about in pages(key))
    assert first.st_size == file_bytes(empty(sizes))
    assert lines == []


def test_pages_of_other_keys_names_and_shapes_are_refused(
    folder: PageFolder, path: Path, make: Callable[..., PageFolder], lines: list[str]
) -> None:
    page = path.read_bytes()
    assert not reads(make(key="f" * 32), 0), "another key has nothing"
    for sizes in ((*SIZES[:-1], 2), SIZES[:-1], (*SIZES, 1), ()):
        assert not folder.read(digest(0), empty(sizes)) and not path.exists(), "it is deleted"
        path.write_bytes(page)
    other = page_path(folder.folder / KEY, digest(1))
    other.parent.mkdir()
    other.write_bytes(page)
    assert not reads(folder, 1) and reads(folder, 0)
    assert "is not used: it is damaged, or holds something else" in lines[0]


def test_damage(folder: PageFolder, path: Path) -> None:
    """200 flipped bits and bytes, cut files, longer files, swapped and repeated blocks, other contents."""
    page, rng = path.read_bytes(), random.Random(0)
    header = len(page) - sum(SIZES)
    rows = [*range(0, header, 2), *(rng.randrange(header, len(page)) for _ in range(200 - header // 2))]
    damaged = []
    for number, row in enumerate(rows):
        flipped = bytearray(page)
        flipped[row] ^= 0xFF if number % 2 else 1 << rng.randrange(8)
        damaged.append(bytes(flipped))
    assert len(damaged) == 200
    damaged += [page[:length] for length in (*range(0, len(page), 97), header - 1, header, len(page) - 1)]
    damaged += [page + b"\0", page + page, page[1:], bytes(len(page)), b"GIF89a" + page, page[:header] * 9]
    first, second = header, len(page) - 2048  # blocks within a part, and across parts
    for block in (8, 512, 2048):
        swapped = bytearray(page)
        swapped[first : first + block], swapped[second : second + block] = (
            page[second : second + block],
            page[first : first + block],
        )
        damaged.append(bytes(swapped))
        damaged.append(page[:second] + page[second - block : second] + page[second + block :])
    for number, contents in enumerate(damaged):
        path.write_bytes(contents)
        assert not reads(folder, 0), number
        assert not folder.has(digest(0)), "it is written again"
    written(folder, 0)
    assert reads(folder, 0)


def test_damage_that_leaves_sums_of_words(folder: PageFolder) -> None:
    """Words, lines and sectors in another order, and one bit flipped in two words, anywhere in a page."""
    sizes, rng = (1 << 14, 5, 9000), random.Random(0)
    written(folder, 0, sizes=sizes)
    path = page_path(folder.folder / KEY, digest(0))
    page = path.read_bytes()
    header = len(page) - sum(sizes)
    for block in (8, 16, 64, 256, 512):
        for _ in range(20):
            start = header + block * rng.randrange((sizes[0] - 2 * block) // block)
            middle, end = start + block, start + 2 * block
            damaged = bytearray(page)
            damaged[start:end] = page[middle:end] + page[start:middle]
            path.write_bytes(damaged)
            assert not reads(folder, 0, sizes), f"{block} bytes at {start - header} are swapped"
    for _ in range(100):
        start, apart = header + rng.randrange(sizes[0] - 800), 8 * rng.randint(1, 99)
        damaged = bytearray(page)
        damaged[start] ^= 128
        damaged[start + apart] ^= 128
        path.write_bytes(damaged)
        assert not reads(folder, 0, sizes), f"bits at {start - header} and {apart} bytes on are flipped"


def test_what_is_no_file(folder: PageFolder, path: Path, lines: list[str]) -> None:
    """A folder, a link to nothing and a link to itself have the name of a page."""
    path.unlink()
    for make_one in (lambda p: p.symlink_to("nothing"), lambda p: p.symlink_to(p), Path.mkdir):
        make_one(path)
        assert not folder.has(digest(0)) and not reads(folder, 0)
        written_again = folder.write(digest(0), filled(0))
        assert written_again == (make_one is not Path.mkdir) == reads(folder, 0)
        if written_again:
            path.unlink()
    assert list(unfinished(folder.folder / KEY)) == []
    assert any(line.endswith("a page is not written: Is a directory") for line in lines)


def test_the_limit_of_a_file(folder: PageFolder, path: Path) -> None:
    """The real error of a full device, from the operating system."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1500, before[1]))
    try:
        assert not folder.write(digest(1), filled(1)) and not folder.has(digest(1))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(unfinished(folder.folder / KEY)) == [] and reads(folder, 0)
    written(folder, 1)
    assert reads(folder, 1)


@pytest.mark.skipif(not ROOT, reason="another user is needed")
def test_a_folder_of_another_user(folder: PageFolder, path: Path) -> None:
    """It may be listed and read, and not written; or not even listed."""
    made = [folder.folder, folder.folder / KEY, path.parent]
    for mode, says in ((0o755, "True True False False"), (0o700, "False False False False")):
        for one in made:
            one.chmod(mode)
        path.chmod(0o644)
        for above in takewhile(lambda one: one != Path(gettempdir()), folder.folder.parents[:5]):
            above.chmod(above.stat().st_mode | 0o055)
        process = os.fork()
        if process == 0:
            code = 1
            try:
                os.setgid(65534)
                os.setuid(65534)
                results = folder.has(digest(0)), reads(folder, 0), folder.write(bytes(16), filled(2))
                code = 0 if " ".join(map(str, (*results, folder.has(bytes(16))))) == says else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0, says


def test_a_folder_that_may_not_be_written(
    folder: PageFolder, path: Path, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages are read where the time of use cannot be set, and refused ones where they cannot be deleted."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    for name in ("utime", "mkdir", "unlink", "rename", "replace"):
        monkeypatch.setattr(os, name, refuse)
    (path.parent / "x").touch()
    assert reads(folder, 0) and not folder.write(digest(1), filled(1))
    path.write_bytes(b"x")
    assert not reads(folder, 0) and not reads(folder, 0) and path.exists()
    assert len(lines) == 2
