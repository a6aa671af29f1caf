"""DeepEP as a dispatch, by a stub of its released ``Buffer`` between ranks that are threads, over Gloo."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dsa_engine.kernels.formats.quantize import codes_and_scales, quantize_tokens
from dsa_engine.parallel import ParallelConfig
from dsa_engine.parallel.experts import deep_ep
from dsa_engine.parallel.experts.all_to_all import AllToAll
from dsa_engine.parallel.experts.dispatch import Dispatch, ModelSizes, Received, Routed, StepSizes
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


def run_experts(received: Received, count: int) -> torch.Tensor:
    """Expert e multiplies by e + 1; what it multiplies may be codes with scales."""
    tokens, local = received.tokens, received.local(count)
    if tokens.dtype == torch.int32:
        codes, scales = codes_and_scales(tokens, HIDDEN)
        tokens = codes.float() * scales.repeat_interleave(128, dim=1)
    factors = torch.where(local < 0, 0.0, (local + 1) * received.topk_weights)
    return (tokens.float().nan_to_num(1e9) * factors.sum(1, keepdim=True)).to(torch.bfloat16)


def finish(dispatch: Dispatch, count: int) -> tuple[torch.Tensor, int]:
    for number in range(rounds := dispatch.rounds):
        dispatch.send_back(number, run_experts(dispatch.receive(number), count))
    return dispatch.combine(), rounds


def both_sums(
    ranks: int, method: str, words: bool = False, max_pairs: int = sys.maxsize, tokens: int = 9
) -> list[tuple[torch.Tensor, torch.Tensor, int]]:
    """For two micro-batches on their way at once, then one alone, and each rank: sums by ``method``, by "all_to_all",
    and rounds."""

    def work(group: Group) -> list[tuple[torch.Tensor, torch.Tensor, int]]:
        placement = ExpertPlacement(contiguous(EXPERTS, ranks), CPU)
        parallel, library = ExpertParallel(group, placement), library_of(mesh_of(ranks, group))
        dispatcher = library.for_decode() if method == "low_latency" else library
        sizes = StepSizes(tokens, max_pairs)
        g, begun, wanted = torch.Generator().manual_seed(group.index), [], []
        for count in (0 if group.index == 2 else tokens, tokens - 3):
            x = torch.randn(count, HIDDEN, generator=g).to(torch.bfloat16)
            x = quantize_tokens(x, power_of_two=True) if words else x
            ids = torch.rand(count, EXPERTS, generator=g).argsort(1)[:, :TOP_K].int()
            ids[:1] = -1  # a token without experts, as padding
            ids[1:2] = EXPERTS - 1 - torch.arange(TOP_K)  # experts of one rank
            given = Routed(x, ids, torch.rand(count, TOP_K, generator=g))
            right = AllToAll().start(parallel, given, StepSizes(tokens))
            wanted.append(finish(right, len(placement.held[group.index]))[0])
            begun.append(dispatcher.start(parallel, given, sizes))
        done = [finish(one, len(placement.held[group.index])) for one in begun]
        done.append(finish(dispatcher.start(parallel, given, sizes), len(placement.held[group.index])))
        wanted.append(wanted[-1])
        return [(sums, right, rounds) for (sums, rounds), right in zip(done, wanted, strict=True)]

    return [one for rank in on_ranks(ranks, work) for one in rank]


def are_right(results: list[tuple[torch.Tensor, torch.Tensor, int]]) -> bool:
    """A few roundings to bfloat16 differ: in the order of sums, and where weights are applied."""
    return all(torch.allclose(sums.float(), right.float(), rtol=2e-2, atol=5e-2) for sums, right, _ in results)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("words", [False, True])
def test_normal_sums_are_those_of_an_all_to_all(calls: list[Call], ranks: int, words: bool) -> None:
    results = both_sums(ranks, "deep_ep", words)
    assert are_right(results) and {rounds for *_, rounds in results} == {1}
    sent = next(args[1] for call, args, _ in calls if call.__name__ == "dispatch")
    assert isinstance(sent, tuple) == words


def test_tokens_that_come_at_once_are_computed_in_rounds(calls: list[Call]) -> None:
    results = both_sums(2, "deep_ep", words=True, max_pairs=16)
    assert are_right(results) and max(rounds for *_, rounds in results) >= 2


@pytest.mark.parametrize("ranks", [2, 4])
def test_low_latency_sums_are_those_of_an_all_to_all(calls: list[Call], ranks: int) -> None:
    """Two micro-batches are begun, one after the other, before either is received."""
    assert are_right(both_sums(ranks, "low_latency"))
    assert {call.__name__ for call, *_ in calls} == {"__init__", "low_latency_dispatch", "low_latency_combine"}


def test_more_tokens_than_the_capacity_are_gathered(calls: list[Call]) -> None:
    assert are_right(both_sums(2, "low_latency", tokens=13)), "12 fit"
    assert not calls


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
