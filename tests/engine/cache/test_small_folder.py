"""The limit of a folder of pages, what else lies in it, and several processes and threads that use it."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dsa_engine.engine.cache.folder import PageFolder, file_bytes, page_path, unfinished
from page_files import KEY, digest, empty, filled, reads, size_of, written


def test_foreign_files_are_neither_counted_nor_deleted(make: Callable[..., PageFolder]) -> None:
    page = file_bytes(empty())
    folder = make(limit=4 * page)
    key = folder.folder / KEY
    foreign = [folder.folder / name for name in ("a.page", "x/y.page", "x/yz/z.page", "x/z.part", f"{KEY}/a.part")]
    foreign += [key / "00" / "z.page", key / "00" / ("f" * 32 + ".page"), key / ("0" * 32 + ".page"), key / "x.part"]
    for one in foreign:
        one.parent.mkdir(parents=True, exist_ok=True)
        one.write_bytes(bytes(5 * page))
        os.utime(one, (1, 1))
    linked = folder.folder.parent / "linked"
    written(make(folder=linked), 50, 51, 52, 53)
    (folder.folder / ("e" * 32)).symlink_to(linked / KEY)
    for name in range(9):
        written(folder, name)
    assert all(one.stat().st_size == 5 * page for one in foreign) and size_of(folder.folder) > 2 * page
    assert size_of(linked) == 4 * page


def test_the_least_recently_used_pages_are_deleted(
    make: Callable[..., PageFolder], monkeypatch: pytest.MonkeyPatch, lines: list[str]
) -> None:
    """Over all keys; a page that is read counts as used; the folder never exceeds its size."""
    page = file_bytes(empty())
    first, second = make(limit=10 * page), make(limit=10 * page, key="f" * 32)
    for folder, name in ((first, 0), (second, 1), (first, 2), (second, 3)):
        written(folder, name)
        os.utime(page_path(folder._key, digest(name)), (1000 + name, 1000 + name))
    assert reads(first, 0)
    for name in range(4, 11):
        written(first, name)
        assert size_of(first.folder) <= 10 * page
    assert [second.has(digest(1)), first.has(digest(2)), second.has(digest(3))] == [False, False, True]
    assert first.has(digest(0)) and first.has(digest(10))
    large = filled(99, (11 * page,))
    assert not first.write(digest(99), large) and first.has(digest(10)), "nothing is deleted in vain"
    assert lines == [f"{first.folder}: there is no room for a page of {11 * page + file_bytes([]):,} bytes"]
    lines.clear()
    monkeypatch.setattr(Path, "unlink", lambda *_, **__: (_ for _ in ()).throw(PermissionError(13, "denied")))
    for name in range(11, 30):
        first.write(digest(name), filled(name))
        assert size_of(first.folder) <= 10 * page, "pages that cannot be deleted count"


@pytest.mark.parametrize("limit", [None, 10**6])
def test_unfinished_files_are_deleted_when_they_are_old(limit: int | None, make: Callable[..., PageFolder]) -> None:
    old = make(limit)
    written(old, 0)
    key = old.folder / KEY
    for name in ("about.00000000000000aa.part", f"{digest(0)[:1].hex()}/{digest(0).hex()}.00000000000000aa.part"):
        (key / name).touch()
        (key / name.replace("aa.part", "bb.part")).touch()
        os.utime(key / name, (time.time() - 7200,) * 2)
    assert len(list(unfinished(key))) == 4
    written(make(limit), 1)
    assert {path.name[-7:] for path in unfinished(key)} == {"bb.part"}
    assert reads(old, 0)


def work(where: Path, seed: int, pages: int, limit: int) -> None:
    """Writes and reads random pages in a child process, until it has read and written so many; fails at wrong bytes."""
    folder, rng, counts = PageFolder(where, limit, KEY, {}), random.Random(seed), [0, 0]
    while min(counts) < pages:
        name = rng.randrange(40)
        counts[0] += reads(folder, name)
        counts[1] += folder.write(digest(name), filled(name))


def fork(function: Callable[..., None], *arguments: Any) -> int:
    process = os.fork()
    if process == 0:
        code = 1
        try:
            function(*arguments)
            code = 0
        finally:
            os._exit(code)
    return process


def test_two_processes_in_a_small_folder(make: Callable[..., PageFolder]) -> None:
    page = file_bytes(empty())
    folder = make(limit=20 * page)
    processes = [fork(work, folder.folder, seed, 30, 20 * page) for seed in range(2)]
    largest = 0
    for process in processes:
        while not (ended := os.waitpid(process, os.WNOHANG))[0]:
            largest = max(largest, size_of(folder.folder))
            time.sleep(0.005)
        assert os.waitstatus_to_exitcode(ended[1]) == 0
    assert 10 * page < largest <= 22 * page, "each process may add a page that the other has not seen"
    assert list(unfinished(folder.folder / KEY)) == []


def test_killed_while_writing(folder: PageFolder) -> None:
    """Each page is there whole or not at all; what is unfinished goes later."""
    sizes, rng = (1 << 20, 1 << 19), random.Random(1)

    def write() -> None:
        while True:
            folder.write(digest(0), filled(0, sizes))
            folder.write(digest(1), filled(1, sizes))

    for _ in range(6):
        process = fork(write)
        time.sleep(0.02 + 0.05 * rng.random())
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        for name in range(2):
            assert reads(folder, name, sizes) == folder.has(digest(name))
    written(folder, 0, 1, sizes=sizes)
    assert reads(folder, 0, sizes) and reads(folder, 1, sizes)
