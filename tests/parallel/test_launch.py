"""What a process learns of its run, and how it ends when a rank fails."""

from __future__ import annotations

import signal
import socket
import sys
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch.distributed as dist

from dsa_engine.parallel import Mesh, ParallelConfig, failure
from dsa_engine.parallel import mesh as mesh_module
from dsa_engine.parallel.agreement import differences
from dsa_engine.parallel.launch_environment import launched_rank, local_world_size, several_processes


def test_a_process_without_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.delenv("RANK", raising=False)
    assert launched_rank() == (0, 1) and not several_processes()


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE in the environment must be a positive integer, not '0'; start several"),
        ({"WORLD_SIZE": "²"}, "must be a positive integer, not '²'"),
        ({"WORLD_SIZE": "4", "RANK": "4"}, "RANK .* an integer from 0 to 3, as WORLD_SIZE is 4, not '4'"),
        ({"WORLD_SIZE": "4", "RANK": ""}, "RANK in the environment must be an integer from 0 to 3"),
    ],
)
def test_an_environment_without_sense(
    environment: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert not several_processes()
    with pytest.raises(ValueError, match=message):
        Mesh.create(ParallelConfig(), "cpu")


def test_ranks_of_this_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun's name for their number goes before deepspeed's."""
    for name in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert local_world_size() == 1
    monkeypatch.setenv("LOCAL_SIZE", "4")
    assert local_world_size() == 4
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert local_world_size() == 2
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "0")
    with pytest.raises(ValueError, match="LOCAL_WORLD_SIZE in the environment must be a positive integer, not '0'"):
        local_world_size()


def test_an_address_without_a_store(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("WORLD_SIZE", "2"), ("RANK", "1"), ("MASTER_ADDR", "127.0.0.1")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(failure, "_reporter", None)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # put back at the end
    monkeypatch.setattr(mesh_module.dist, "init_process_group", lambda *_, **__: pytest.fail("nobody answered"))
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    monkeypatch.setenv("MASTER_PORT", str(port))
    with pytest.raises(TimeoutError, match=f"127.0.0.1:{port} .MASTER_ADDR, MASTER_PORT. for 0.1 seconds"):
        Mesh.create(ParallelConfig(timeout=0.1), "cpu")
    for wrong in ("abc", "70000", ""):
        monkeypatch.setenv("MASTER_PORT", wrong)
        with pytest.raises(ValueError, match=f"MASTER_PORT .* 65535, not '{wrong}'"):
            Mesh.create(ParallelConfig(timeout=0.5), "cpu")
    monkeypatch.delenv("MASTER_PORT")
    with pytest.raises(ValueError, match="MASTER_ADDR and MASTER_PORT must be in the environment"):
        Mesh.create(ParallelConfig(timeout=0.5), "cpu")


class Ended(Exception):
    """In place of the end of the process."""


@pytest.fixture
def reporter(monkeypatch: pytest.MonkeyPatch) -> Iterator[failure._Reporter]:
    """Rank 0 of four, with a store of this process."""
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(failure, "_OTHERS_S", 0.1)
    monkeypatch.setattr(failure, "_OWN_S", 0.1)

    def end(code: int) -> None:
        raise Ended(code)

    monkeypatch.setattr(failure.os, "_exit", end)
    monkeypatch.setattr(failure.faulthandler, "dump_traceback_later", lambda *_, **__: None)
    handler = signal.getsignal(signal.SIGTERM)
    reporter = failure._Reporter(sys.__excepthook__)
    reporter.store = dist.HashStore()
    reporter.store.set_timeout(timedelta(seconds=1))
    yield reporter
    signal.signal(signal.SIGTERM, handler)


def fails(reporter: failure._Reporter, error: BaseException) -> int:
    """The exit status of a rank that fails."""
    with pytest.raises(Ended) as ended:
        reporter(type(error), error, None)
    return ended.value.args[0]


LOST = RuntimeError("[gloo] Connection closed by peer")


@pytest.mark.parametrize(
    ("error", "others", "code", "said"),
    [
        (LookupError("no such expert"), [1, 2, 3], 1, "[rank 0] failed and ends the run:\n"),
        (ValueError("cp_size 3"), [1, 2, 3], 2, "error: cp_size 3\n"),
        (KeyboardInterrupt(), [], 130, "[rank 0] interrupted\n"),
        (LOST, [2], 1, "[rank 0] no word from rank 1, 3: ended"),
        (LOST, [1, 2, 3], 1, "RuntimeError: [gloo] Connection closed by peer\n"),
    ],
)
def test_what_the_first_rank_to_fail_says(
    error: BaseException, others: list[int], code: int, said: str, reporter: failure._Reporter,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    reporter.brief = (ValueError,)
    assert reporter.store is not None
    for rank in others:
        reporter.store.set(f"rank {rank}", "")
    assert fails(reporter, error) == code
    shown = capsys.readouterr().err
    assert said in shown and ("no word" in shown) == ("no word" in said)
    assert reporter.store.check(["over"]) and reporter.store.get("shown") == str(code).encode()


@pytest.mark.parametrize(
    ("error", "first", "said"),
    [
        (LOST, "rank 2: LookupError: no such expert", "[rank 0] ends, because rank 2: LookupError: no such expert\n"),
        (ValueError("cp_size 3"), "rank 1: ValueError: cp_size 3", ""),  # all ranks fail alike: once is enough
    ],
)
def test_what_a_later_rank_says(
    error: BaseException, first: str, said: str, reporter: failure._Reporter, capsys: pytest.CaptureFixture[str]
) -> None:
    reporter.brief = (ValueError,)
    assert reporter.store is not None
    for key, value in (("first", first), ("shown", "7"), ("over", "")):
        reporter.store.set(key, value)
    assert fails(reporter, error) == 7, "that of the first"
    assert capsys.readouterr().err == said


def test_the_watch_for_failures(
    reporter: failure._Reporter, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It ends with the run, with a store that is gone, and with the process when another rank has failed."""
    store = reporter.store
    assert store is not None
    monkeypatch.setattr(failure, "_connect", lambda seconds: store)
    reporter._left.set()
    reporter._watch()
    for key, value in (("first", "rank 1: a failure"), ("shown", "1"), ("over", "")):
        store.set(key, value)
    with pytest.raises(Ended):
        reporter._watch()
    assert store.check(["rank 0"])
    reporter._watch()  # the main thread is about to end the process

    def gone(seconds: float) -> dist.Store:
        raise TimeoutError("the store is gone")

    monkeypatch.setattr(failure, "_connect", gone)
    with caplog.at_level("INFO"):
        reporter._watch()
    assert "the store is gone" in caplog.text


def test_differences_are_named() -> None:
    assert differences({0: {"a": "1", "c": "3"}, 1: {"a": "2", "c": "3"}, 2: {"a": "1", "b": "x", "c": "3"}}) == [
        "a is 1 on rank 0, 2 and 2 on rank 1",
        "b is not known on rank 0, 1 and x on rank 2",
    ]
