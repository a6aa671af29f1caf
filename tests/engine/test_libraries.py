"""Steps of DeepSeek-V3.2 on a fake device that run kernels of other libraries, at its sizes: stubs with the released
signatures take every call."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from dsa_engine.kernels.runtime import libraries
from dsa_engine.kernels.runtime.launch import INTERPRETED
from dsa_engine.measure.requests import add_filled
from dsa_engine.sampling_params import SamplingParams
from fake_cuda import FakeDevice
from library_stubs import install

pytestmark = [
    pytest.mark.skipif(INTERPRETED, reason="the interpreter needs values"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
]
GREEDY = SamplingParams(temperature=0.0, max_tokens=8)
MANY = {
    "block_scaled_linear": "DeepGEMM's FP8 products",
    "dense_attention": "FlashAttention-3",
    "expert_mlp": "DeepGEMM's grouped experts",
    "indexer_scores": "DeepGEMM's index logits",
}
FEW = {"expert_mlp": "DeepGEMM's masked experts", "indexer_scores": "DeepGEMM's paged index logits"}


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    yield
    libraries.use({})


def prefill_once(device: FakeDevice, engine: Any, tokens: int) -> None:
    """One watched step of a request that ends with it."""
    request = engine.add([5] * tokens, GREEDY)
    with device.watched():
        step = engine.scheduler.schedule()
        engine.runner.launch(engine.runner.plan(step))
    engine.scheduler.launched(step)
    engine.finish(request, "abort")


@pytest.mark.parametrize(("world", "cache"), [(1, "bfloat16"), (8, "fp8")])
def test_a_prefill_and_a_decode(
    fake_engine: Callable[..., Any], world: int, cache: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = install(monkeypatch, "flash_mla", "deep_gemm", "flash_attn_interface")
    fp8 = cache == "fp8"
    sparse = "FlashMLA's sparse decode" if fp8 else "FlashMLA's sparse prefill"
    many = MANY | {"sparse_attention": "FlashMLA's sparse prefill"}  # FP8 rows are expanded for it
    names = {f"{name}, many rows": adapter for name, adapter in many.items()}
    names |= {f"{name}, few rows": adapter for name, adapter in (FEW | {"sparse_attention": sparse}).items()}
    for used in (False, True):
        with FakeDevice() as device:
            engine = fake_engine(device, "deepseek_v32", world, kv_cache_dtype=cache)
            libraries.use(names if used else {})
            calls.clear()
            prefill_once(device, engine, 8192 * world)
            assert device.waits == ["event in placement.py:_plan"] * (2 if world > 1 else 0)
            prefill = Counter(call.__name__ for call, _, _ in calls)
            calls.clear()
            add_filled(engine, world, 100_000, GREEDY)
            engine.step()  # warms up and captures; a wait within is an error
            decode = Counter(call.__name__ for call, _, _ in calls)
            replayed = len(calls)
            engine.step()
            assert len(calls) == replayed, "a graph calls no library"
            if not used:
                assert not prefill and not decode, "kernels='triton' runs no library"
    attention = "flash_mla_with_kvcache" if fp8 else "flash_mla_sparse_fwd"
    assert prefill["m_grouped_fp8_gemm_nt_contiguous"] == 4, "two products of two layers"
    assert prefill["flash_mla_sparse_fwd"] >= 3 and prefill["flash_attn_3_varlen_func"] >= 3
    assert prefill["fp8_gemm_nt"] >= 12
    assert decode["m_grouped_fp8_gemm_nt_masked"] == 8 and decode[attention] == 6, "in the warm-up and in the graph"
    assert bool(prefill["fp8_mqa_logits"]) == fp8
    assert decode["fp8_paged_mqa_logits"] == decode["get_paged_mqa_logits_metadata"] == (6 if fp8 else 0)


@pytest.mark.parametrize(("world", "micro_batches"), [(8, True), (64, False)])
def test_deep_ep(
    fake_engine: Callable[..., Any], world: int, micro_batches: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prefill waits once a layer and micro-batch, for counts; a decode step is a graph without a wait, launched
    ahead. On more than one node a part has one mode."""
    calls = install(monkeypatch, "deep_ep")
    modes = [("deep_ep", "deep_ep")] if world == 8 else [("deep_ep", "all_gather"), ("auto", "deep_ep")]
    for prefill, decode in modes:
        calls.clear()
        with FakeDevice() as device:
            parallel = {"moe_dispatch": prefill, "decode_dispatch": decode, "node_size": 8}
            engine = fake_engine(device, "deepseek_v32", world, parallel, enable_dbo=micro_batches)
            layers = 2 * (1 + micro_batches)
            begun = Counter(call.__name__ for call, _, _ in calls)
            assert begun["__init__"] == 1, "at the start, when ranks connect"
            if prefill == "deep_ep":
                calls.clear()
                prefill_once(device, engine, 65_536)
                seen = Counter(call.__name__ for call, _, _ in calls)
                assert seen == dict.fromkeys(("get_dispatch_layout", "dispatch", "combine"), layers)
                assert [wait for wait in device.waits if "deep_ep" in wait] == device.waits
                assert len(device.waits) == layers and device.count("collective", "all_to_all") == 0
                assert all(isinstance(args[1], tuple) for call, args, _ in calls if call.__name__ == "dispatch")
            if decode == "deep_ep":
                add_filled(engine, 64, 100_000, GREEDY)
                calls.clear()
                with device.watched():
                    engine.step()  # warms up and captures; a wait within is an error
                (captured,) = device.captures
                seen = Counter(call.__name__ for call, _, _ in calls)
                exchanges = sum(launch.kind == "library" for launch in captured.launches)
                assert seen == dict.fromkeys(("low_latency_dispatch", "low_latency_combine"), 2 * layers)
                assert exchanges == 4 * layers, "each is begun and arrives"
                for ahead in (1, 2):
                    with device.watched():
                        engine.step()
                    assert device.waits == ["event in samples.py:read"] and device.count("graph") == 1
                    assert engine.launched_ahead == ahead
