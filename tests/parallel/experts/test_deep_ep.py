"""DeepEP as a dispatch: what it refuses, and its sizes. Tokens: ``distributed/model/test_deep_ep.py``."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dsa_engine.parallel import ParallelConfig
from dsa_engine.parallel.experts import deep_ep
from dsa_engine.parallel.experts.dispatch import ModelSizes, Routed, StepSizes
from dsa_engine.parallel.experts.placement import ExpertParallel, ExpertPlacement, contiguous
from dsa_engine.parallel.group import Group
from gloo_ranks import on_ranks
from library_stubs import install
from library_stubs.checks import Call

HIDDEN, EXPERTS, TOP_K = 2048, 16, 3
CPU = torch.device("cpu")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    monkeypatch.setattr(deep_ep, "_DEVICE", "cpu")
    return install(monkeypatch, "deep_ep")


def mesh_of(ranks: int, group: Any = None, device: torch.device = CPU, nodes: Any = None, **options: Any) -> Any:
    config = ParallelConfig(**{"moe_dispatch": "deep_ep", "decode_dispatch": "deep_ep"} | options)
    nodes = [0] * ranks if nodes is None else nodes
    return SimpleNamespace(config=config, nodes=nodes, device=device, ep=group)


def library_of(mesh: Any, **given: Any) -> deep_ep.DeepEP:
    library = deep_ep.DeepEP(mesh)
    library.prepare(ModelSizes(HIDDEN, EXPERTS, TOP_K, 9, torch.bfloat16)._replace(**given))
    return library


def test_more_tokens_than_the_capacity_are_gathered(calls: list[Call]) -> None:
    """12 fit."""

    def work(group: Group) -> tuple[int, ...]:
        parallel = ExpertParallel(group, ExpertPlacement(contiguous(EXPERTS, 2), CPU))
        ids = torch.zeros(13, TOP_K, dtype=torch.int32)
        given = Routed(torch.ones(13, HIDDEN).bfloat16(), ids, torch.ones(13, TOP_K))
        decode = library_of(mesh_of(2, group)).for_decode()
        return decode.start(parallel, given, StepSizes(13)).receive(0).tokens.shape

    assert on_ranks(2, work) == [(26, HIDDEN)] * 2 and not calls


def refusals() -> list[tuple[dict[str, Any], dict[str, Any], str]]:
    """Changes of mesh and model, and words of the error."""
    return [
        ({"device": torch.device("meta")}, {}, "moe_dispatch .* meta"),
        ({}, {"dtype": torch.float32}, "dtype is float32"),
        ({"ranks": 3}, {}, "there are 3 ranks"),
        ({"nodes": [0, 1]}, {}, "ranks are on nodes"),
        ({}, {"hidden": 3072}, "hidden_size is 3072"),
        ({}, {"top_k": 12}, "12 experts"),
        ({}, {"experts": 17}, "17 experts on 2 ranks.*redundant_experts"),
        ({"ranks": 16, "nodes": [0] * 8 + [1] * 8}, {}, "both options on 16 ranks"),
        ({"ranks": 1, "moe_dispatch": "auto"}, {}, "decode_dispatch 'deep_ep': there are 1 ranks"),
    ]


@pytest.mark.parametrize(("mesh", "model", "words"), refusals())
def test_what_does_not_suit(calls: list[Call], mesh: dict[str, Any], model: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        library_of(mesh_of(**{"ranks": 2} | mesh), **model)


def test_the_library_must_be_there(calls: list[Call], monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    with pytest.raises(ValueError, match="deep_ep is installed"):
        library_of(mesh_of(2))


def test_buffers_of_many_ranks(calls: list[Call]) -> None:
    """One mode on 64 ranks: what its buffer is made with."""
    group = SimpleNamespace(size=64, handle=SimpleNamespace(size=lambda: 64, rank=lambda: 0))
    nodes = [rank // 8 for rank in range(64)]
    made: list[Callable[[], Any]] = []
    for other in ({"decode_dispatch": "all_gather"}, {"moe_dispatch": "auto"}):
        sizes = {"hidden": 7168, "experts": 256, "top_k": 8, "decode_rows": 600}
        made.append(lambda other=other, sizes=sizes: library_of(mesh_of(64, group, nodes=nodes, **other), **sizes))
    prefill, decode = made[0](), made[1]()
    assert prefill.buffer.nvlink > 0 < prefill.buffer.rdma and not prefill.buffer.low_latency
    assert decode.capacity == 256 and decode.buffer.queues == 4 and decode.buffer.nvlink == 0
    assert 3.8e9 < decode.buffer.rdma < 3.9e9
