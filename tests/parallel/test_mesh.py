"""What a mesh and its configuration refuse, and which ranks stand together. Nothing here starts a process."""

from __future__ import annotations

import ctypes
import os
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dsa_engine.config.model import ModelConfig
from dsa_engine.model.model import Model
from dsa_engine.model.runtime import Runtime
from dsa_engine.parallel import Mesh, ParallelConfig
from dsa_engine.parallel import mesh as mesh_module
from dsa_engine.parallel.device import choose_device, warn_of_old_driver
from dsa_engine.parallel.experts import KINDS, MoeDispatch
from dsa_engine.parallel.experts.all_gather import AllGather
from dsa_engine.parallel.experts.all_to_all import AllToAll
from dsa_engine.parallel.experts.by_node import ByNode
from dsa_engine.parallel.experts.deep_ep import DeepEP, LowLatency
from dsa_engine.parallel.group import Group
from dsa_engine.parallel.tensor_parallel import vocab_shard
from dsa_engine.weights.formats import Unquantized

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"cp_size": 2.0}, "cp_size .* 2.0"),
        ({"moe_dispatch": "x"}, "moe_dispatch .*'x'"),
        ({"rebalance_every": 0}, "rebalance_every .* 0"),
        ({"timeout": float("nan")}, "timeout .* nan"),
    ],
)
def test_parallel_config_refuses(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ParallelConfig(**keys)


@pytest.mark.parametrize("device", ["gpu", "meta", "cuda:99"])
def test_devices_that_do_not_exist(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=f"device '{device}' .* give .*'cpu'"):
        Mesh.create(ParallelConfig(), device)


def test_devices_beyond_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ValueError, match="cuda:5 .* 2 CUDA devices"):
        Mesh.create(ParallelConfig(), "cuda:5")
    monkeypatch.setenv("LOCAL_RANK", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    with pytest.raises(ValueError, match="cuda:2 .* 2 CUDA devices"):
        Mesh.create(ParallelConfig(), "cuda")
    with pytest.raises(ValueError, match="'cuda:0' .* 3 ranks"):
        Mesh.create(ParallelConfig(), "cuda:0")


@pytest.mark.parametrize(("name", "size"), [("cp_size", 4), ("tp_size", 5)])
def test_sizes_that_do_not_divide_the_world(name: str, size: int) -> None:
    with pytest.raises(ValueError, match=f"{name} {size} does not divide the world size 6"):
        Mesh(ParallelConfig(**{name: size}), 0, 6, CPU)


def test_experts_of_one_process_cannot_move() -> None:
    with pytest.raises(ValueError, match="rebalance_every 9: .* there is only one; start several, or leave it out"):
        Mesh.create(ParallelConfig(rebalance_every=9), "cpu")


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The ranks of every process group that is made, that for messages last; none is made in truth."""
    groups: list[tuple[int, ...]] = []

    def new_group(ranks: list[int], backend: str | None, use_local_synchronization: bool, **_: object) -> str:
        assert backend is None or (backend == "gloo" and groups[:1] == [tuple(ranks)])
        groups.append(tuple(ranks))
        return f"group {len(groups)} of {ranks}"

    monkeypatch.setattr(mesh_module.dist, "new_group", new_group)
    return groups


def test_groups_are_neighbours(made: list[tuple[int, ...]]) -> None:
    mesh = Mesh(ParallelConfig(cp_size=4, tp_size=2), 5, 8, CPU)
    assert mesh.ep.ranks == tuple(range(8)) and mesh.ep.index == 5
    assert mesh.world.ranks == tuple(range(8)) and mesh.world.index == 5
    assert mesh.cp.ranks == (4, 5, 6, 7) and mesh.cp.index == 1
    assert mesh.tp.ranks == (4, 5) and mesh.tp.index == 1
    assert mesh.cp_ranks(1) == range(4, 8)
    # Every rank makes every group, in the same order; else the others would wait for it.
    everyone = tuple(range(8))
    assert made == [everyone, everyone, (0, 1, 2, 3), (4, 5, 6, 7), (0, 1), (2, 3), (4, 5), (6, 7), everyone]
    assert mesh.host.ranks == tuple(range(8)) and mesh.host.index == 5


def test_groups_of_the_same_ranks_are_one(made: list[tuple[int, ...]]) -> None:
    mesh = Mesh(ParallelConfig(tp_size=4), 2, 4, CPU)
    assert made == [(0, 1, 2, 3)] * 3, "one for tokens on their way to experts and one for messages, beside the others'"
    assert mesh.world.handle is mesh.cp.handle is mesh.tp.handle is not mesh.ep.handle
    assert len({id(group) for group in mesh.groups}) == 4


def test_a_mesh_of_some_ranks_counts_them_from_0(made: list[tuple[int, ...]]) -> None:
    """Ranks 4 to 7 of a run: groups are made over these, everything else knows them as 0 to 3."""
    mesh = Mesh(ParallelConfig(cp_size=2), 3, 4, CPU, ranks=[4, 5, 6, 7])
    assert (mesh.rank, mesh.world_size) == (3, 4)
    assert mesh.world.ranks == (0, 1, 2, 3) and mesh.cp.ranks == (2, 3) and mesh.cp.index == 1
    assert made == [(4, 5, 6, 7), (4, 5, 6, 7), (4, 5), (6, 7), (4, 5, 6, 7)]


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ([1], "this process is rank 0 of the run, which is none of \\[1\\]"),
        ([0, 2], "ranks must be different ones of 0 … 1, ascending, not \\[0, 2\\]"),
        ([1, 0], "ranks must be different ones of 0 … 1, ascending"),
        ([0, 0], "ranks must be different ones of 0 … 1, ascending"),
    ],
)
def test_ranks_that_cannot_form_a_mesh(ranks: list[int], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(mesh_module, "report_failures", lambda: None)  # it would hook this process
    with pytest.raises(ValueError, match=message):
        Mesh.create(ParallelConfig(), "cpu", ranks)


def test_nodes_are_numbered_by_their_first_rank(made: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = Mesh(ParallelConfig(), 2, 6, CPU)
    monkeypatch.setattr(mesh.world, "all_gather", lambda mine: torch.tensor([7, 7, 99, 99, 3, 7]))
    assert mesh._exchange_nodes() == [0, 0, 1, 1, 2, 0]


def test_neighbours_on_several_nodes_are_warned_of(made: list[tuple[int, ...]]) -> None:
    mesh = Mesh(ParallelConfig(tp_size=2), 0, 6, CPU)
    mesh.set_nodes([0, 0, 1, 1, 2, 2])
    with pytest.warns(UserWarning, match="tp_size 2: ranks 2 to 3 share embedding, .* but not a node"):
        mesh.set_nodes([0, 0, 0, 1, 1, 1])
    assert mesh.nodes == (0, 0, 0, 1, 1, 1)


@pytest.mark.parametrize("option", [{"moe_dispatch": "by_node"}, {"decode_dispatch": "auto"}], ids=str)
def test_every_rank_makes_the_groups_of_nodes_and_rails(made: list[tuple[int, ...]], option: dict[str, Any]) -> None:
    made_by_rank = []
    for rank in range(5):
        made.clear()
        mesh = Mesh(ParallelConfig(cp_size=5, **option), rank, 5, CPU)
        mesh.set_nodes([0, 0, 1, 1, 1])
        groups = mesh.node_groups
        assert groups is not None and mesh.groups[-2:] == (groups.node, groups.rail)
        assert rank == groups.node.ranks[groups.node.index] == groups.rail.ranks[groups.rail.index]
        made_by_rank.append([*made])
        assert mesh.static_decode == ("decode_dispatch" not in option)
    assert all(one == made_by_rank[0] for one in made_by_rank)
    assert made_by_rank[0][3:] == [(0, 1), (2, 3, 4), (0, 2, 4), (1, 3)]
    on_cuda = Mesh(mesh.config, 4, 5, torch.device("cuda"))
    assert on_cuda.static_decode and isinstance(on_cuda.experts.dispatchers[True], AllGather), "a graph needs them"


@pytest.mark.parametrize("name", KINDS)
def test_what_is_known_before_there_is_a_mesh(made: list[tuple[int, ...]], name: MoeDispatch) -> None:
    assert Mesh(ParallelConfig(decode_dispatch=name), 0, 2, CPU).static_decode == KINDS[name].static_decode


def test_decode_by_deep_ep(made: list[tuple[int, ...]]) -> None:
    mesh = Mesh(ParallelConfig(moe_dispatch="deep_ep", decode_dispatch="deep_ep"), 0, 2, CPU)
    assert [type(one) for one in mesh.experts.dispatchers] == [DeepEP, LowLatency]


@pytest.mark.parametrize(
    ("nodes", "line"),
    [([0, 0, 0], "all ranks are on one node"), ([0, 1, 2], "every node has one rank"), ([0, 0, 1], None)],
)
def test_one_level_of_nodes_is_logged(
    made: list[tuple[int, ...]], nodes: list[int], line: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    for rank in range(3):
        mesh = Mesh(ParallelConfig(moe_dispatch="by_node"), rank, 3, CPU)
        mesh.set_nodes(nodes)
        assert (mesh.node_groups is None) == (line is not None)
        assert isinstance(mesh.experts.dispatchers[False], AllToAll if line else ByNode)
    assert caplog.messages == ([f"the dispatch 'by_node' is 'all_to_all' here, as {line}"] if line else [])
    assert Mesh(ParallelConfig(), 0, 3, CPU).node_groups is None


@pytest.mark.parametrize("peer", [1, 3, -1])
def test_messages_go_to_other_ranks(peer: int) -> None:
    group = Group((0, 1, 2), 1, None)
    with pytest.raises(ValueError, match=f"{peer} is no other rank of a group of 3 in which this is 1"):
        group.send(torch.zeros(1), peer)
    with pytest.raises(ValueError, match="is no other rank"):
        group.recv(torch.zeros(1), peer)


@pytest.mark.parametrize(
    ("world", "tp", "message"),
    [
        (13, 1, "n_routed_experts 12 cannot be divided over 13 ranks: each holds at least one; start at most 12"),
        (4, 4, "num_attention_heads 6 cannot be divided over 4 ranks; choose a tp_size that divides it"),
    ],
)
def test_models_that_do_not_divide(
    world: int,
    tp: int,
    message: str,
    oracle: Callable[..., Any],
    made: list[tuple[int, ...]],
) -> None:
    folder: Path = oracle("deepseek_v32").folder
    mesh = Mesh(ParallelConfig(tp_size=tp), 0, world, CPU)
    runtime = Runtime(mesh, torch.float32, Unquantized(torch.float32, CPU), 1 << 20)
    with pytest.raises(ValueError, match=message):
        Model(ModelConfig.from_pretrained(folder), runtime)


def test_parts_of_a_vocabulary_take_as_many_rows() -> None:
    def parts(vocab: int, size: int) -> list[tuple[tuple[int, int], int]]:
        return [vocab_shard(vocab, Group(tuple(range(size)), i, None)) for i in range(size)]

    assert parts(12, 3) == [((0, 4), 4), ((4, 8), 4), ((8, 12), 4)]
    assert parts(331, 2) == [((0, 166), 166), ((166, 331), 166)]
    assert parts(5, 4) == [((0, 2), 2), ((2, 4), 2), ((4, 5), 2), ((5, 5), 2)]


def test_groups_that_carry_tokens_have_their_own_communicator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over NCCL it has a stream of high priority."""
    made: list[tuple[list[int], str | None, Any]] = []

    def new_group(ranks: list[int], timeout: float, backend: str | None, options: Any, alone: bool) -> Any:
        made.append((ranks, backend, options))
        return object()

    monkeypatch.setattr(mesh_module, "new_group", new_group)
    monkeypatch.setattr(mesh_module.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(mesh_module.dist, "get_backend", lambda: "nccl")
    monkeypatch.setattr(mesh_module.dist, "ProcessGroupNCCL", SimpleNamespace(Options=dict), raising=False)
    Mesh(ParallelConfig(tp_size=2), 0, 4, torch.device("cuda"))
    every = [0, 1, 2, 3]
    of_experts = (every, None, {"is_high_priority_stream": True})
    halves = ([0, 1], None, None), ([2, 3], None, None)
    assert made == [(every, None, None), of_experts, *halves, (every, "gloo", None)]


QUEUES, ORDER, REGISTER = "CUDA_DEVICE_MAX_CONNECTIONS", "NCCL_LAUNCH_ORDER_IMPLICIT", "NCCL_GRAPH_REGISTER"
SEVERAL_NODES = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}


@pytest.mark.parametrize(
    ("given", "one_part", "expected", "warned"),
    [
        ({}, True, {QUEUES: "32", ORDER: "1"}, []),
        ({}, False, {QUEUES: "32"}, []),
        (SEVERAL_NODES, True, {QUEUES: "32", ORDER: "1", REGISTER: "0"}, []),
        ({**SEVERAL_NODES, REGISTER: "1"}, False, {QUEUES: "32", REGISTER: "1"}, []),
        ({QUEUES: "8", ORDER: "1"}, True, {QUEUES: "8", ORDER: "1"}, [f"{QUEUES} is '8', .* set 32"]),
        ({QUEUES: "x", ORDER: "0"}, True, {QUEUES: "x", ORDER: "0"}, [f"{QUEUES} is 'x'", f"{ORDER} is '0', .* set 1"]),
        ({ORDER: "0"}, False, {QUEUES: "32", ORDER: "0"}, []),
    ],
)
def test_what_cuda_reads_when_it_starts(
    given: dict[str, str], one_part: bool, expected: dict[str, str], warned: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is set before the first question to CUDA, unless the environment has it."""
    for name in (QUEUES, ORDER, REGISTER, *SEVERAL_NODES):
        monkeypatch.setenv(name, "")  # restores what the test changes
        monkeypatch.delenv(name)
        if name in given:
            monkeypatch.setenv(name, given[name])
    seen: list[dict[str, str]] = []

    def available() -> bool:
        seen.append({name: os.environ[name] for name in (QUEUES, ORDER, REGISTER) if name in os.environ})
        return True

    monkeypatch.setattr(torch.cuda, "is_available", available)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: None)
    with warnings.catch_warnings(record=True) as texts:
        warnings.simplefilter("always")
        assert choose_device("auto", one_part) == torch.device("cuda", 0)
    assert seen[0] == expected
    assert len(texts) == len(warned)
    for text, pattern in zip(texts, warned, strict=True):
        assert re.search(pattern, str(text.message))
    monkeypatch.setenv(ORDER, "1")
    with pytest.raises(ValueError, match=f"{ORDER} is '1', with which NCCL refuses .* leave it unset"):
        choose_device("auto", one_part=False)


@pytest.mark.parametrize(("version", "number"), [(12080, "12.8"), (12090, ""), (13000, "")])
def test_old_drivers_are_warned_of(version: int, number: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def library(name: str) -> SimpleNamespace:
        return SimpleNamespace(cuDriverGetVersion=lambda at: setattr(at._obj, "value", version))

    monkeypatch.setattr(ctypes, "CDLL", library)
    with warnings.catch_warnings(record=True) as texts:
        warn_of_old_driver()
    assert [re.search(r"CUDA ([\d.]+): before 12.9", str(text.message))[1] for text in texts] == [number] * bool(number)
