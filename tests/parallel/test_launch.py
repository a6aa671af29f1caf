"""What a process learns of its run, and how it ends when a rank fails."""

from __future__ import annotations

import socket
import sys

import pytest

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


def test_differences_are_named() -> None:
    assert differences({0: {"a": "1", "c": "3"}, 1: {"a": "2", "c": "3"}, 2: {"a": "1", "b": "x", "c": "3"}}) == [
        "a is 1 on rank 0, 2 and 2 on rank 1",
        "b is not known on rank 0, 1 and x on rank 2",
    ]
