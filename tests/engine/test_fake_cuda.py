"""The engine on a fake CUDA device, at production sizes: waits of the host for the device, types of products, streams,
and bytes that live at once.

A change that waits for the device fails here, and so does one that allocates a few percent more than the figures below.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from dsa_engine.engine.cache.link import PageReceiver, RankPages
from dsa_engine.engine.engine import Engine
from dsa_engine.kernels.runtime.launch import INTERPRETED
from dsa_engine.measure.requests import add_filled
from dsa_engine.parallel.disaggregation import PageGroups
from dsa_engine.parallel.experts.counts import ExpertCounts
from dsa_engine.sampling_params import SamplingParams
from fake_cuda import FakeDevice
from fake_cuda.world import FakeGroup

pytestmark = [
    pytest.mark.skipif(INTERPRETED, reason="the interpreter needs values"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
]
GREEDY = SamplingParams(temperature=0.0, max_tokens=8)


# Maximum GiB that live at once beside weights and caches in a prefill of up to 8,192 tokens a rank, 128K in all.
CASES = {
    ("deepseek_v32", 1, "dequantize"): 3.15,
    ("deepseek_v32", 8, "dequantize"): 3.3,
    ("deepseek_v3", 8, "dequantize"): 3.2,
    ("glm_moe_dsa", 8, "dequantize"): 2.85,
    # The released model as it is: in prefill a quantisation for each product.
    ("deepseek_v32", 64, None): 1.08,
}


def prefill(device: FakeDevice, engine: Engine, length: int) -> int:
    """Runs the last step of a prefill; returns the maximum number of bytes that it added."""
    request = engine.add([5] * length, GREEDY)
    while not request.prefilled:
        step = engine.scheduler.schedule()
        plan = engine.runner.plan(step)
        before = device.live
        with device.watched():
            engine.runner.launch(plan)
        engine.scheduler.launched(step)
    engine.finish(request, "abort")
    return device.peak - before


@pytest.mark.parametrize(("model", "world", "quantization"), CASES, ids=lambda value: str(value))
def test_a_step(fake_engine: Callable[..., Any], model: str, world: int, quantization: str | None) -> None:
    with FakeDevice() as device:
        engine = fake_engine(device, model, world, quantization=quantization)
        added = prefill(device, engine, min(8192 * world, 131_072))
        sparse = 2  # layers with experts
        assert device.waits == ["event in placement.py:_plan"] * (sparse if world > 1 else 0)
        multiplied = {dtype for launch in device.launches for dtype in launch.dtypes}
        assert multiplied == {torch.bfloat16}, "float32 has no tensor cores; gate and index weights sum in it"
        names = {launch.name for launch in device.launches}
        assert not names & {"aten::index_add", "aten::index_add_", "aten::index_put_"}, "sums in the order of atomics"
        assert added / 2**30 <= CASES[model, world, quantization]

        add_filled(engine, min(2 * world, 64), 100_000, GREEDY)
        with device.watched():
            engine.step()  # warms up and captures; a wait within is an error
        for _ in range(2):  # launched before the previous step is read
            with device.watched():
                engine.step()
            assert device.waits == ["event in samples.py:read"] and device.count("graph") == 1
        assert engine.launched_ahead == 2


def test_a_step_asks_for_no_properties_of_its_device(
    fake_engine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each operation depends on them, and PyTorch takes microseconds to tell."""
    with FakeDevice() as device:
        engine = fake_engine(device, "deepseek_v32", 8)
        with monkeypatch.context() as patch:
            for name in ("get_device_properties", "get_device_capability"):
                patch.setattr(torch.cuda, name, None)
            prefill(device, engine, 65_536)
            assert len(device.launches) > 100


def test_what_norms_and_gates_make_is_quantised_there(fake_engine: Callable[..., Any]) -> None:
    """Apart are quantised: what o takes in each layer, and the tokens of experts where there is no dispatch."""
    with FakeDevice() as device:
        engine = fake_engine(device, "deepseek_v32", 1)
        prefill(device, engine, 8192)
        dense, with_experts = 1, 2
        assert sum(one.name == "quantize_rows_kernel" for one in device.launches) == dense + 2 * with_experts


def test_micro_batches(fake_engine: Callable[..., Any]) -> None:
    """A prefill in two micro-batches waits for their counts only, and takes no more memory; a decode step is one graph
    of both, which is replayed before the step before is read."""
    wholes = {}
    for enabled in (False, True):
        with FakeDevice() as device:
            options = {"quantization": "dequantize", "enable_dbo": enabled}
            engine = fake_engine(device, "deepseek_v32", 8, **options)
            added = prefill(device, engine, 65_536)
            assert device.waits == ["event in placement.py:_plan"] * (4 if enabled else 2)
            exchanges = 2 * (1 + enabled)  # layers with experts, micro-batches
            assert device.count("collective", "all_to_all") == 2 * exchanges, "tokens, sums"
            add_filled(engine, 16, 100_000, GREEDY)
            with device.watched():
                engine.step()
            (captured,) = device.captures
            assert sum(launch.name == "reduce_scatter" for launch in captured.launches) == exchanges
            for _ in range(2):
                with device.watched():
                    engine.step()
                assert device.waits == ["event in samples.py:read"] and device.count("graph") == 1
            wholes[enabled] = added
    assert wholes[True] < 1.1 * wholes[False]


def test_experts_move_between_replays(fake_engine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The host waits for nothing more, and graphs captured before are replayed: weights and tables are where they were.
    A turn moves one expert, and takes no memory but that of the start."""
    with FakeDevice() as device:
        engine = fake_engine(device, "deepseek_v32", 8, {"rebalance_every": 2}, quantization="dequantize")
        rebalancing = engine.rebalancing
        layers = [layer.moe for layer in engine.model.layers if layer.moe is not None]
        placements = [moe.expert_parallel.placement for moe in layers]
        swapped = [(one.held[1], one.held[0], *one.held[2:]) for one in placements]
        loads = ExpertCounts("", (1, 2), ((1.0,) * 256,) * 2)
        monkeypatch.setattr(rebalancing, "_loads", lambda: loads)
        monkeypatch.setattr(rebalancing, "_plans", lambda *_: swapped)

        def stored() -> list[int]:
            tensors = [tensor for moe in layers for tensor in moe.experts.moved]
            return [id(tensor) for tensor in (*tensors, *(one._replicas for one in placements))]

        begun_with = stored()
        add_filled(engine, 16, 100_000, GREEDY)
        engine.step()
        before = device.live
        for turn in range(5):
            held = placements[0].held
            with device.watched():
                engine.step()
            assert device.waits == ["event in samples.py:read"] and device.count("graph") == 1
            assert device.count("collective", "exchange") == (turn > 0), "planned after the second step of all"
            assert (placements[0].held != held) == (turn > 0)
            assert device.peak - before < 4 << 20
        assert len(device.captures) == 1 and stored() == begun_with and engine.launched_ahead == 5
        expert = 3 * 7168 * 2048 * 2  # more than the bytes of a turn
        assert len(rebalancing.staging) == expert and rebalancing.moved_bytes == 4 * 2 * expert


def test_skewed_routing_costs_time_and_not_memory(fake_engine: Callable[..., Any]) -> None:
    """One rank of 64 whose experts get up to 16 times the tokens of balanced routing, in rounds and in one."""
    peaks, rounds = [], []
    for skew, chunk in ((1.0, None), (1.5, None), (16.0, None), (16.0, 1 << 30)):
        with FakeDevice() as device:
            parallel = {"skew": skew, "moe_chunk_size": chunk}
            sizes = {
                "max_num_batched_tokens": 2048,
                "workspace": "64MiB",
            }  # small, so that experts take the largest part
            engine = fake_engine(device, "deepseek_v32", 64, parallel, **sizes)
            peaks.append(prefill(device, engine, 131_072) / 2**30)
            rounds.append(
                device.count("triton", "combine_kernel") // 2 - 1
            )  # 2 layers with experts: one a round, and one at the end
    print(peaks, rounds)
    assert rounds == [1, 2, 17, 1]
    returned = 2048 * 8 * 7168 * 2 / 2**30  # results for this rank's tokens from earlier rounds
    assert max(peaks[:3]) < peaks[0] + returned < peaks[3] / 4


def test_skewed_routing_in_an_all_gather_too(fake_engine: Callable[..., Any]) -> None:
    """Every token comes to every rank, and this one has up to 8 times as many pairs as under balanced routing."""
    peaks, rounds = [], []
    for skew, chunk in ((1.0, None), (1.5, None), (8.0, None), (7.0, 131_071)):
        with FakeDevice() as device:
            parallel = {"skew": skew, "moe_chunk_size": chunk, "moe_dispatch": "all_gather"}
            sizes = {"max_num_batched_tokens": 2048, "workspace": "64MiB"}
            engine = fake_engine(device, "deepseek_v32", 8, parallel, **sizes)
            peaks.append(prefill(device, engine, 16_384) / 2**30)
            rounds.append(device.count("triton", "combine_kernel") // 2)  # 2 layers with experts
            assert device.waits == ["event in placement.py:local_pairs"] * 2
    print(peaks, rounds)
    assert rounds == [1, 2, 8, 1]
    returned = 16_384 * 7168 * 2 / 2**30  # the sums of several rounds, which are longer than the tokens' codes
    assert max(peaks[:3]) <= peaks[0] + returned < peaks[3] / 2


DRAWN = SamplingParams(temperature=0.8, top_p=0.9, top_k=20, min_p=0.01)


@pytest.mark.parametrize(("world", "how"), [(1, "greedy"), (8, "drawn"), (8, "penalised"), (8, "relaxed")])
def test_a_step_with_drafts(fake_engine: Callable[..., Any], world: int, how: str) -> None:
    """One graph, launched before the previous step is read; the host waits only for the tokens that it reads, also with
    random sampling, penalties and relaxed acceptance."""
    params = {"drawn": DRAWN, "penalised": replace(GREEDY, presence_penalty=0.5)}.get(how, GREEDY)
    drafts = {"num_speculative_tokens": 3, "relaxed_topk": 10 * (how == "relaxed")}
    drafts |= {"begin_thinking_token": 5, "end_thinking_token": 6}
    with FakeDevice() as device:
        engine = fake_engine(device, "deepseek_v32", world, speculative_config=drafts)
        add_filled(engine, 2 * world, 100_000, replace(params, max_tokens=200))
        with device.watched():
            engine.step()  # warms up and captures; a wait within is an error
        for ahead in (1, 2, 3):
            with device.watched():
                engine.step()
            assert device.waits == ["event in samples.py:read"] and device.count("graph") == 1
            assert engine.launched_ahead == ahead


@pytest.mark.parametrize("enabled", [False, True])
def test_micro_batches_by_node(fake_engine: Callable[..., Any], enabled: bool) -> None:
    """2 nodes with 4 ranks. What a rail brings is passed on inside on one side stream, and sums leave the node
    on another, both beside what is launched meanwhile; the host waits for counts only."""
    with FakeDevice() as device:
        parallel = {"node_size": 4, "moe_dispatch": "by_node"}
        engine = fake_engine(device, "deepseek_v32", 8, parallel, quantization="dequantize", enable_dbo=enabled)
        prefill(device, engine, 65_536)
        micro_batches = 1 + enabled
        assert device.waits == ["event in placement.py:_ways"] * 2 * micro_batches
        groups = engine.mesh.node_groups
        assert groups is not None
        rail, node = (device.stream_of(group.ranks, group.communicator).number for group in (groups.rail, groups.node))
        streams = [launch.stream for launch in device.launches if launch.name == "all_to_all"]
        there, back = [rail, node], [node, rail]
        assert streams == (there * micro_batches + back * micro_batches) * 2, "two layers with experts"
        changes = {"pack_tokens_kernel": 2, "combine_kernel": 1}
        sides = {name: {one.stream for one in device.launches if one.name == name} - {0} for name in changes}
        assert len(sides["combine_kernel"]) == 1 and sides["combine_kernel"] != sides["pack_tokens_kernel"]
        for name, count in changes.items():
            (side,) = sides[name]
            beside = sum(one.name == name and one.stream == side for one in device.launches)
            assert beside == count * 2 * micro_batches, name


def test_streams_of_a_rank_with_links_to_63_others(fake_engine: Callable[..., Any], threads_by_hand: None) -> None:
    """PyTorch hands out 32 streams in turn: none of them is used twice."""
    with FakeDevice() as device:
        engine = fake_engine(device, "deepseek_v32", 64, {"node_size": 8}, enable_dbo=True)
        prefill(device, engine, 65_536)
        every = FakeGroup(tuple(range(128)), 0, None, device=device)
        receiver = PageReceiver(engine.cache, PageGroups(every, every))
        receiver.post([RankPages(0, rank, [rank]) for rank in range(1, 64)])
        receiver.close()
        others = [torch.cuda.Stream() for _ in range(8)]
        with pytest.raises(RuntimeError, match="two users get stream 1: PyTorch has 32"):
            others += [torch.cuda.Stream() for _ in range(32)]
