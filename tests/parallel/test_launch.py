"""What a process learns of its run: its rank, the store, and whether the processes of the other ranks live."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta

import pytest
import torch.distributed as dist

from dsa_engine.parallel import Mesh, ParallelConfig
from dsa_engine.parallel import mesh as mesh_module
from dsa_engine.parallel.agreement import differences
from dsa_engine.parallel.failure import reporter as failure
from dsa_engine.parallel.failure import store as run_store
from dsa_engine.parallel.failure import watch as failure_watch
from dsa_engine.parallel.failure.peers import name_of, state_of, wake
from dsa_engine.parallel.launch_environment import launched_rank, local_world_size, several_processes


def test_a_process_without_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.delenv("RANK", raising=False)
    assert launched_rank() == (0, 1) and not several_processes()


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE in the environment must be a positive integer, not '0'; start several"),
        ({"WORLD_SIZE": "-2"}, "must be a positive integer, not '-2'"),
        ({"WORLD_SIZE": "two"}, "must be a positive integer, not 'two'"),
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


def test_ranks_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.fixture
def mute_port() -> Iterator[int]:
    """A port that accepts connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        accepted = []

        def accept() -> None:
            while True:
                try:
                    accepted.append(server.accept()[0])
                except OSError:
                    return

        thread = threading.Thread(target=accept)
        thread.start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)
        thread.join()
        for connection in accepted:
            connection.close()


def test_a_port_that_stays_mute_is_not_waited_for(mute_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("WORLD_SIZE", "2"), ("RANK", "1"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", mute_port)):
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(failure, "_reporter", None)
    monkeypatch.setattr(run_store, "_MUTE_S", 0.2)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # put back at the end
    monkeypatch.setattr(mesh_module.dist, "init_process_group", lambda *_, **__: pytest.fail("nobody answered"))
    with pytest.raises(
        TimeoutError, match=f"127.0.0.1:{mute_port} .MASTER_ADDR, MASTER_PORT. accepts connections, but"
    ):
        Mesh.create(ParallelConfig(timeout=0.5), "cpu")
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("MASTER_PORT", str(server.getsockname()[1]))
    with pytest.raises(
        TimeoutError, match="^rank 0 has not come: for 0.1 seconds no process has answered at 127.0.0.1:"
    ):
        Mesh.create(ParallelConfig(timeout=0.1), "cpu")
    for rank, port in (("1", "abc"), ("0", "abc"), ("1", "70000"), ("1", "")):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("MASTER_PORT", port)
        with pytest.raises(ValueError, match=f"MASTER_PORT in the environment must be a port number, .* not '{port}'"):
            Mesh.create(ParallelConfig(timeout=0.5), "cpu")
    monkeypatch.delenv("MASTER_PORT")
    with pytest.raises(ValueError, match="MASTER_ADDR and MASTER_PORT must be in the environment"):
        Mesh.create(ParallelConfig(timeout=0.5), "cpu")


@pytest.fixture
def sleeper() -> Iterator[Callable[[], tuple[subprocess.Popen[bytes], str]]]:
    """Starts a process that waits; and how others know it."""
    started: list[subprocess.Popen[bytes]] = []

    def start() -> tuple[subprocess.Popen[bytes], str]:
        started.append(process := subprocess.Popen(["sleep", "300"]))
        return process, name_of(process.pid)

    yield start
    for process in started:
        process.kill()
        process.wait()


def test_states_of_processes(sleeper: Callable[[], tuple[subprocess.Popen[bytes], str]]) -> None:
    assert state_of(name_of(os.getpid())) == "running"
    process, name = sleeper()
    assert state_of(name) == "running"
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
    assert state_of(name) == "stopped"
    wake(name)
    os.waitid(os.P_PID, process.pid, os.WCONTINUED | os.WNOWAIT)
    assert state_of(name) == "running"
    machine, pid, since = name.split()
    assert state_of(f"{machine} {pid} {int(since) - 1}") == "ended", "another process has its number now"
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert state_of(name) == "ended", "nobody has asked for its end yet"
    process.wait()
    assert state_of(name) == "ended"
    wake(name)
    assert state_of(f"elsewhere {pid} {since}") == "unknown"


def test_only_ranks_that_may_be_the_cause_are_named(
    sleeper: Callable[[], tuple[subprocess.Popen[bytes], str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "6")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(failure, "_PEERS_S", 0.0)
    reporter = failure._Reporter(sys.excepthook)
    store = reporter.store = dist.HashStore()
    store.set_timeout(timedelta(seconds=1))
    for rank in (0, 4):
        store.set(str(rank), "has failed")
    (one, name_of_one), (three, name_of_three) = sleeper(), sleeper()
    store.set("process 1", name_of_one)
    store.set("process 3", name_of_three)
    store.set("process 2", "elsewhere 2 1")  # nothing is known of rank 5
    said = reporter._lost(reporter._states())
    assert said.startswith("no word from rank 2, 5: it hangs, or its process has ended without an error of its own")
    assert "1" not in said and "3" not in said, "they live, and wait for the others"
    store.set("answers 5", "")
    before = {2: "unknown", 5: "unknown"}
    assert reporter._lost(before).startswith("no word from rank 2: "), "the other one has answered since"
    store.set("2", "has failed")
    store.set("5", "has failed")
    assert reporter._lost(reporter._states()) == "no word from rank 1, 3: it hangs, though its process is alive"
    before = reporter._states()
    one.kill()
    os.waitid(os.P_PID, one.pid, os.WEXITED | os.WNOWAIT)
    after = reporter._states()
    assert (before, after) == ({1: "running", 3: "running"}, {1: "ended", 3: "running"})
    assert reporter._lost(reporter._states()).startswith(
        "no word from rank 1: its process has ended without an error of its own (killed"
    )
    assert reporter._lost(before).startswith("no word from rank 1: its process has ended")
    store.set("ends 1", "")
    assert reporter._lost(before).startswith("no word from rank 1: its program has come to its end (by sys.exit")
    three.kill()
    os.waitid(os.P_PID, three.pid, os.WEXITED | os.WNOWAIT)
    assert reporter._lost(after).startswith("no word from rank 1: "), "torchrun has ended the other one since"


def test_the_watch_for_failures_ends_with_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    monkeypatch.setattr(failure_watch, "has_listener", lambda: True)
    monkeypatch.setattr(failure_watch, "connect", lambda seconds: store)
    heard: list[dist.Store] = []
    watches = [failure_watch.FailureWatch(heard.append) for _ in range(2)]
    for watch in watches:
        watch.start()
    watches[0].stop()
    assert not watches[0]._thread.is_alive() and heard == []
    store.set("first", "rank 0: a failure")
    watches[1]._thread.join()
    assert heard == [store]
    watches[1].stop()


class Relay:
    """Stands between a store and its clients: accepts connections, but passes no answer on while ``silent``."""

    def __init__(self, port: int):
        self.silent, self.accepted = True, 0
        self._store, self._server = port, socket.create_server(("127.0.0.1", 0))
        self._ends: list[socket.socket] = []
        self.port = self._server.getsockname()[1]
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def drop(self) -> None:
        """All connections that there are."""
        for end in self._ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.silent = False
        self._server.shutdown(socket.SHUT_RDWR)
        self.drop()
        for thread in self._threads:
            thread.join()
        for end in (self._server, *self._ends):
            end.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                pair = [self._server.accept()[0], socket.create_connection(("127.0.0.1", self._store))]
                self._ends += pair
                self.accepted += 1
                for source, target, answers in ((*pair, False), (*reversed(pair), True)):
                    passing = threading.Thread(target=self._pass_on, args=(source, target, answers), daemon=True)
                    self._threads.append(passing)
                    passing.start()

    def _pass_on(self, source: socket.socket, target: socket.socket, answers: bool) -> None:
        with suppress(OSError):
            while data := source.recv(4096):
                while answers and self.silent:
                    time.sleep(0.01)
                target.sendall(data)
            target.shutdown(socket.SHUT_RDWR)


def until(condition: Callable[[], bool]) -> None:
    """``AssertionError`` where it has not come true within half a minute."""
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_the_watch_outlives_a_store_that_is_slow(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It does not answer at first, then it drops its connections, then a rank fails; and once it has gone for good."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    relay = Relay(store.port)
    for name, value in (("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", relay.port)):
        monkeypatch.setenv(name, str(value))
    for module, name, seconds in (
        (failure_watch, "_POLL_S", 0.01),
        (failure_watch, "_RETRY_S", 0.01),
        (failure_watch, "_GONE_S", 0.05),
        (run_store, "_MUTE_S", 0.1),
    ):
        monkeypatch.setattr(module, name, seconds)
    monkeypatch.setattr(failure_watch, "STORE_WAIT", timedelta(seconds=0.1))
    heard: list[str] = []
    watch, other = (failure_watch.FailureWatch(lambda signs: heard.append(signs.get("first").decode())) for _ in "12")
    watch.start()
    until(lambda: relay.accepted >= 5)  # an attempt takes two connections
    assert watch._thread.is_alive()
    relay.silent = False
    for _ in range(2):
        time.sleep(0.3)  # some questions and answers
        relay.drop()
    assert watch._thread.is_alive() and heard == [] and not caplog.records
    dist.PrefixStore("dsa_engine/failure/0", store).set("first", "rank 0: a failure")
    watch._thread.join(30)
    assert heard == ["rank 0: a failure"]
    relay.close()
    other.start()
    other._thread.join(30)
    assert not other._thread.is_alive() and len(heard) == 1, "a store that is gone ends nothing"
    (record,) = caplog.records
    assert record.levelname == "WARNING" and record.message.startswith("the store of the run is gone")


def test_a_rank_that_does_not_react_is_killed(
    sleeper: Callable[[], tuple[subprocess.Popen[bytes], str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failure_watch, "_OTHERS_S", 0.0)
    store = dist.HashStore()
    (stuck, stuck_name), (fails, fails_name), (leaves, leaves_name) = sleeper(), sleeper(), sleeper()
    for rank, name in ((1, stuck_name), (2, fails_name), (3, leaves_name), (4, "elsewhere 1 1")):
        store.set(f"process {rank}", name)
    store.set("2", "has an error of its own")
    store.set("ends 3", "")
    failure_watch.see_off(store, 0, 6)  # rank 5 has not begun
    assert stuck.wait() == -signal.SIGKILL and fails.poll() is None and leaves.poll() is None
    assert store.check(["ends 0"])


def test_differences_are_named() -> None:
    assert differences({0: {"a": "1", "c": "3"}, 1: {"a": "2", "c": "3"}, 2: {"a": "1", "b": "x", "c": "3"}}) == [
        "a is 1 on rank 0, 2 and 2 on rank 1",
        "b is not known on rank 0, 1 and x on rank 2",
    ]
