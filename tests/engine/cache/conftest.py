"""A folder of pages in a test's own folder."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dsa_engine.engine.cache import folder as folder_module
from dsa_engine.engine.cache.folder import PageFolder, page_path
from page_files import KEY, digest, written


@pytest.fixture
def make(tmp_path: Path, lines: list[str]) -> Callable[..., PageFolder]:
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


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Iterator[list[str]]:
    """Lines of the log; at most one of each kind may come, as a test takes less than a minute."""
    shown: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: shown.append(record.getMessage())  # type: ignore[method-assign]
    folder_module.logger.addHandler(handler)
    yield shown
    folder_module.logger.removeHandler(handler)
    for kind in ("is not used", "not written", "no room", "not deleted"):
        assert sum(kind in line for line in shown) <= 1, shown
