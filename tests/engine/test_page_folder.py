"""Files of pages: a page comes back as it was written, or not at all, whatever happens to its file and folder."""

from __future__ import annotations

import errno
import logging
import os
import random
import resource
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import takewhile
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import pytest

from dsa_engine.engine.disk import page_file, page_folder
from dsa_engine.engine.disk.folder_files import keys, page_path, pages, unfinished
from dsa_engine.engine.disk.page_file import file_bytes
from dsa_engine.engine.disk.page_folder import PageFolder
from dsa_engine.engine.disk.page_reader import PageReader, WantedPage
from dsa_engine.engine.disk.page_writer import PageWriter

KEY = "0123456789abcdef" * 2
TOKENS = [5, 6, 7, 8, 1 << 40]
SIZES = (700, 0, 64, 4096, 1)
ROOT = os.geteuid() == 0

Parts = list[memoryview]


def filled(name: int, sizes: Sequence[int] = SIZES) -> Parts:
    """Parts with random bytes that depend on ``name``."""
    rng = random.Random(name)
    return [memoryview(bytearray(rng.randbytes(size))) for size in sizes]


def empty(sizes: Sequence[int] = SIZES) -> Parts:
    return [memoryview(bytearray(size)) for size in sizes]


def digest(name: int) -> bytes:
    return random.Random(-1 - name).randbytes(16)


def written(folder: PageFolder, *names: int, sizes: Sequence[int] = SIZES) -> None:
    for name in names:
        assert folder.write(digest(name), TOKENS, filled(name, sizes)) and folder.has(digest(name))


def reads(folder: PageFolder, name: int, sizes: Sequence[int] = SIZES) -> bool:
    """Whether a page is read, and is right if so."""
    parts = empty(sizes)
    done = folder.read(digest(name), TOKENS, parts)
    assert not done or parts == filled(name, sizes), "wrong bytes are accepted"
    return done


def size_of(folder: Path) -> int:
    return sum(file.bytes for key in keys(folder) for file in pages(key))


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., PageFolder]:
    def made(limit: int | None = None, folder: Path = tmp_path / "pages", key: str = KEY) -> PageFolder:
        return PageFolder(folder, limit, key, {"model": "a"})

    return made


@pytest.fixture
def folder(make: Callable[..., PageFolder]) -> PageFolder:
    return make()


@pytest.fixture
def path(folder: PageFolder) -> Path:
    """The file of page 0, which is there."""
    written(folder, 0)
    return page_path(folder.folder / KEY, digest(0))


@pytest.fixture(autouse=True)
def lines(caplog: pytest.LogCaptureFixture) -> Iterator[list[str]]:
    """Lines of the log; at most one of each kind may come, as a test takes less than a minute."""
    shown: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: shown.append(record.getMessage())  # type: ignore[method-assign]
    page_folder.logger.addHandler(handler)
    yield shown
    page_folder.logger.removeHandler(handler)
    for kind in ("is not used", "not written", "no room", "not deleted"):
        assert sum(kind in line for line in shown) <= 1, shown


@pytest.mark.parametrize(
    "sizes",
    [(1,), (0, 0), (), SIZES, (3,) * 2500, (0, 1) * 700, (1 << 20, 5, 1 << 19), (2008, 2009, 4016)],
    ids=["byte", "empty", "none", "odd", "many", "many, some empty", "large", "whole sums"],
)
def test_round_trip(sizes: tuple[int, ...], folder: PageFolder, lines: list[str]) -> None:
    written(folder, 0, 1, sizes=sizes)
    assert reads(folder, 0, sizes) and reads(folder, 1, sizes) and not reads(folder, 2, sizes)
    (first, _) = (file for key in keys(folder.folder) for file in pages(key))
    assert first.bytes == file_bytes(TOKENS, empty(sizes))
    assert lines == []


def test_calls_that_transfer_a_part(folder: PageFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call takes some bytes of some buffers, as signals, pipes of file systems and full disks make it."""
    rng = random.Random(0)
    for name in ("writev", "preadv"):
        whole = getattr(os, name)

        def part(number: int, buffers: Parts, *position: int, whole: Any = whole) -> int:
            assert 0 < len(buffers) <= 1024 and all(len(buffer) for buffer in buffers)
            first = buffers[: rng.randint(1, len(buffers))]
            return int(whole(number, [*first[:-1], first[-1][: rng.randint(1, len(first[-1]))]], *position))

        monkeypatch.setattr(os, name, part)
    for sizes in (SIZES, (3,) * 200):
        written(folder, 3, sizes=sizes)
        assert reads(folder, 3, sizes)


def test_pages_of_other_tokens_keys_names_and_shapes_are_refused(
    folder: PageFolder, path: Path, make: Callable[..., PageFolder], lines: list[str]
) -> None:
    page = path.read_bytes()
    assert not reads(make(key="f" * 32), 0), "another key has nothing"
    for tokens in ([*TOKENS[:-1], 9], TOKENS[:-1], [*TOKENS, 1], []):
        assert not folder.read(digest(0), tokens, empty()) and not path.exists(), "it is deleted"
        path.write_bytes(page)
    for sizes in ((*SIZES[:-1], 2), SIZES[:-1], (*SIZES, 1), ()):
        assert not folder.read(digest(0), TOKENS, empty(sizes))
        path.write_bytes(page)
    other = page_path(folder.folder / KEY, digest(1))
    other.parent.mkdir()
    other.write_bytes(page)
    assert not reads(folder, 1) and reads(folder, 0)
    assert "is not used: its header is damaged or of another page" in lines[0]


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


def test_another_version_is_refused(
    folder: PageFolder, path: Path, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    version = page_file.VERSION
    monkeypatch.setattr(page_file, "VERSION", version + 1)
    says = f"{path} is not used: it has version {version} of the format, not {version + 1}"
    assert not reads(folder, 0) and lines == [says]


def test_what_is_no_file(folder: PageFolder, path: Path, lines: list[str]) -> None:
    """A pipe, a folder, a link to nothing and a link to itself have the name of a page."""
    path.unlink()
    for make_one in (os.mkfifo, lambda p: p.symlink_to("nothing"), lambda p: p.symlink_to(p), Path.mkdir):
        make_one(path)
        assert not folder.has(digest(0)) and not reads(folder, 0)
        written_again = folder.write(digest(0), TOKENS, filled(0))
        assert written_again == (make_one is not Path.mkdir) == reads(folder, 0)
        if written_again:
            path.unlink()
    assert list(unfinished(folder.folder / KEY)) == []
    assert any(line.endswith("a page is not written: Is a directory") for line in lines)


def full_call(error: int, after: int) -> Callable[..., int]:
    """A ``writev`` that takes ``after`` bytes in all, and then fails."""
    writev, room = os.writev, [after]

    def full(number: int, buffers: Parts) -> int:
        taken = b"".join(buffers)[: room[0]]
        if not taken:
            raise OSError(error, os.strerror(error))
        room[0] -= len(taken)
        return writev(number, [taken])

    return full


@pytest.mark.parametrize("after", [0, 50, 1000])
def test_a_full_disk(
    after: int, folder: PageFolder, path: Path, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for error in (errno.ENOSPC, errno.EIO, errno.EDQUOT):
        with monkeypatch.context() as patch:
            patch.setattr(os, "writev", full_call(error, after))
            assert not folder.write(digest(1), TOKENS, filled(1)) and not folder.has(digest(1))
    assert lines == [f"{folder.folder}: a page is not written: No space left on device"]
    assert reads(folder, 0) and sum(file.is_file() for file in path.parents[1].rglob("*")) == 2, "with about.json"
    with monkeypatch.context() as patch:
        patch.setattr(os, "writev", lambda *_: 0)
        assert not folder.write(digest(1), TOKENS, filled(1))
    written(folder, 1)
    assert reads(folder, 1)


def test_the_limit_of_a_file(folder: PageFolder, path: Path) -> None:
    """The real error of a full device, from the operating system."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1500, before[1]))
    try:
        assert not folder.write(digest(1), TOKENS, filled(1)) and not folder.has(digest(1))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(unfinished(folder.folder / KEY)) == []


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
                results = folder.has(digest(0)), reads(folder, 0), folder.write(bytes(16), TOKENS, filled(2))
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
    assert reads(folder, 0) and not folder.write(digest(1), TOKENS, filled(1))
    path.write_bytes(b"x")
    assert not reads(folder, 0) and not reads(folder, 0) and path.exists()
    assert len(lines) == 2


def test_a_folder_that_vanishes_and_returns(folder: PageFolder, path: Path, lines: list[str]) -> None:
    away = folder.folder.with_name("away")
    folder.folder.rename(away)
    assert not folder.has(digest(0)) and not reads(folder, 0)
    folder.folder.write_text("a file")
    assert not folder.has(digest(0)) and not reads(folder, 0) and not folder.write(digest(1), TOKENS, filled(1))
    folder.folder.unlink()
    written(folder, 1)
    assert {made.stat().st_mode & 0o77 for made in (folder.folder, *folder.folder.rglob("*"))} == {0}
    assert (folder.folder / KEY / "about.json").exists()
    away.joinpath(KEY, digest(0)[:1].hex()).rename(path.parent)
    assert reads(folder, 0) and reads(folder, 1)
    assert len(lines) == 2, lines


def test_foreign_files_are_neither_counted_nor_deleted(make: Callable[..., PageFolder]) -> None:
    page = file_bytes(TOKENS, empty())
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
    page = file_bytes(TOKENS, empty())
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
    assert not first.write(digest(99), TOKENS, large) and first.has(digest(10)), "nothing is deleted in vain"
    assert lines == [f"{first.folder}: there is no room for a page of {11 * page + file_bytes(TOKENS, []):,} bytes"]
    lines.clear()
    monkeypatch.setattr(Path, "unlink", lambda *_, **__: (_ for _ in ()).throw(PermissionError(13, "denied")))
    for name in range(11, 30):
        first.write(digest(name), TOKENS, filled(name))
        assert size_of(first.folder) <= 10 * page, "pages that cannot be deleted count"


def test_a_large_folder_is_seldom_listed(make: Callable[..., PageFolder], monkeypatch: pytest.MonkeyPatch) -> None:
    page, sizes = file_bytes(TOKENS, empty((100,))), (100,)
    folder, looks = make(limit=1000 * page), []
    monkeypatch.setattr(page_folder, "pages", lambda key: looks.append(key) or pages(key))
    for name in range(45):
        written(folder, name, sizes=sizes)
    assert 4 <= len(looks) <= 6


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


@pytest.mark.parametrize("name", ["a b'\"$(x)", "ä漢\n%s", "-rf", "x" * 200, ".hidden"])
def test_odd_names(name: str, make: Callable[..., PageFolder], tmp_path: Path) -> None:
    target = tmp_path / "target" / name
    written(make(folder=target), 0)
    (tmp_path / "link").symlink_to(target)
    linked = make(folder=tmp_path / "link", limit=10**6)
    assert reads(linked, 0)
    written(linked, 1)
    assert len(list(pages(target / KEY))) == 2


def work(where: Path, seed: int, pages: int, limit: int) -> None:
    """Writes and reads random pages in a child process, until it has read and written so many; fails at wrong bytes."""
    folder, rng, counts = PageFolder(where, limit, KEY, {}), random.Random(seed), [0, 0]
    while min(counts) < pages:
        name = rng.randrange(40)
        counts[0] += reads(folder, name)
        counts[1] += folder.write(digest(name), TOKENS, filled(name))


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
    page = file_bytes(TOKENS, empty())
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
            folder.write(digest(0), TOKENS, filled(0, sizes))
            folder.write(digest(1), TOKENS, filled(1, sizes))

    for _ in range(6):
        process = fork(write)
        time.sleep(0.02 + 0.05 * rng.random())
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        for name in range(2):
            assert reads(folder, name, sizes) == folder.has(digest(name))
    written(folder, 0, 1, sizes=sizes)
    assert reads(folder, 0, sizes) and reads(folder, 1, sizes)


def test_threads(folder: PageFolder, path: Path) -> None:
    """The writer has written all that it was given when it is closed; the reader stops at the first missing page."""
    done: list[int] = []
    writer = PageWriter(folder)
    for name in range(1, 6):
        writer.write(digest(name), TOKENS, filled(name), lambda: None, lambda name=name: done.append(name))
    writer.write(digest(9), TOKENS, filled(9), lambda: 1 / 0, lambda: done.append(9))  # type: ignore[arg-type]
    writer.close()
    assert done == [1, 2, 3, 4, 5, 9] and not folder.has(digest(9))
    reader, pages_ = PageReader(folder), [WantedPage(digest(name), TOKENS, empty()) for name in (0, 3, 8, 1)]
    loads = [reader.load(pages_, lambda: None), reader.load(pages_[:1], lambda: 1 / 0)]  # type: ignore[arg-type]
    until = time.monotonic() + 60
    while loads[1].pages is None and time.monotonic() < until:
        time.sleep(0.001)
    assert [load.pages for load in loads] == [2, 0] and pages_[1].parts == filled(3)
    reader.close()
