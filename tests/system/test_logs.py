"""The log: its lines at a start, its level and its destination; progress without a terminal."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsa_engine import LLM, SamplingParams
from dsa_engine.cli import main
from dsa_engine.kernels.runtime import cpu
from dsa_engine.system import logs, progress


@pytest.fixture
def quiet_root(monkeypatch: pytest.MonkeyPatch) -> Iterator[logging.Logger]:
    """A logger that is not set up; the test removes pytest's handlers, which come after fixtures, from the root."""
    logger = logging.getLogger("dsa_engine")
    monkeypatch.setattr(logger, "handlers", [])
    level = logger.level
    logger.setLevel(logging.NOTSET)
    yield logger
    logger.setLevel(level)


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


def test_what_takes_long_shows_its_progress(
    demo_cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Loading counted tensors; the comparison of kernels, the prefill of a stream and a plan were silent."""
    monkeypatch.setattr(progress, "_FIRST_S", 1e-9)
    monkeypatch.setattr(progress, "_EVERY_S", 0.0)
    caplog.set_level(logging.INFO, "dsa_engine")
    sizes = {"device": "cpu", "cache_memory": "1MiB", "max_model_len": 512, "max_num_batched_tokens": 64}
    with LLM("demo-random", **sizes, hf_overrides={"rms_norm_eps": 2e-6}) as llm:  # a model that was never compared
        monkeypatch.setattr("dsa_engine.engine.calls.call._TICK_S", 0.0)
        pieces = list(llm.stream([5] * 400, SamplingParams(max_tokens=2, ignore_eos=True)))
    assert [len(piece.token_ids) for piece in pieces] == [1, 1]
    fixed = "--weights fp8 --cache fp8 --drafts 0 --tp-size 1"
    main(f"plan --devices 8 --input-len 8192 {fixed}".split())
    for shown in (
        r"loading weights: .* of .*MB in .*B/s, .* to go",
        # Without a C++ compiler there is nothing to compare.
        *([r"comparing with references: \d+ kernels in .*, \w+"] if cpu.library() is not None else []),
        r"prefill: \d+ of 400 tokens in ",
        r"planning: \d of \d deployments in ",
    ):
        assert re.search(shown, caplog.text), shown
