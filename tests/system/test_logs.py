"""The log: its lines at a start, its level and its destination; progress without a terminal."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsa_engine import LLM, SamplingParams
from dsa_engine.system import logs


@pytest.fixture
def quiet_root(monkeypatch: pytest.MonkeyPatch) -> Iterator[logging.Logger]:
    """A logger that is not set up; the test removes pytest's handlers, which come after fixtures, from the root."""
    logger = logging.getLogger("dsa_engine")
    monkeypatch.setattr(logger, "handlers", [])
    level = logger.level
    logger.setLevel(logging.NOTSET)
    yield logger
    logger.setLevel(level)


def test_a_start_says_what_was_loaded_and_what_fits(demo_cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "dsa_engine"):
        llm = LLM("demo-random", device="cpu", cache_memory="1MiB", max_model_len=512)
    text = caplog.text
    assert "weights loaded on this rank, " in text and "float32 on cpu" in text
    tokens = llm.engine.cache.pages * 64
    assert f"cache of each rank: {tokens:,} tokens in pages of 64, 1" in text
    assert f"room for {tokens / 512:.2f} requests of max_model_len 512 on 1 rank(s)" in text
    assert "dtype 'auto' is float32 on a CPU; the checkpoint says bfloat16" in text
    caplog.clear()
    # 9 pages: both enter with 4 and want a fifth.
    llm.generate([[5] * 250, [6] * 250], SamplingParams(max_tokens=16, ignore_eos=True))
    assert llm.engine.scheduler.preemptions == 1 and "the caches are full: request 1 loses its pages" in caplog.text


def test_lines_go_to_stderr_and_the_level_is_kept(
    quiet_root: logging.Logger, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(logging.root, "handlers", [])
    log = logging.getLogger("dsa_engine.some.file")
    logs.set_up_logging()
    logs.set_up_logging()
    log.info("first")
    log.debug("not this")
    captured = capsys.readouterr()
    assert captured.err.count("first") == 1 and "not this" not in captured.err and captured.out == ""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    log.info("of every rank")
    log.warning("%s and more", "second")
    err = capsys.readouterr().err
    assert "[dsa_engine rank 1]" in err and "WARNING second and more" in err and "of every rank" not in err
    # A program's own handlers get the records, and ours is silent.
    own = logging.StreamHandler()
    monkeypatch.setattr(logging.root, "handlers", [own])
    log.warning("third")
    assert capsys.readouterr().err == "third\n"


@pytest.mark.parametrize("level, shown", [("debug", True), ("ERROR", False)])
def test_the_level_of_the_environment(
    quiet_root: logging.Logger,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    level: str,
    shown: bool,
) -> None:
    monkeypatch.setattr(logging.root, "handlers", [])
    monkeypatch.setenv("DSA_ENGINE_LOG_LEVEL", level)
    logs.set_up_logging()
    quiet_root.debug("a detail")
    assert ("a detail" in capsys.readouterr().err) == shown
    monkeypatch.setenv("DSA_ENGINE_LOG_LEVEL", "loud")
    with pytest.raises(ValueError, match="DSA_ENGINE_LOG_LEVEL must be one of DEBUG, INFO, .*, not 'loud'"):
        logs.set_up_logging()
