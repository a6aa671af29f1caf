"""The start of an engine on a fake device: the largest steps run, caches take the remaining memory, graphs are
captured, and no later step takes more than was set aside."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from dsa_engine.engine.sampling.grammar import GrammarMasks
from dsa_engine.engine.speculation.acceptance import count_equal
from dsa_engine.engine.speculation.drafter import GraphKey
from dsa_engine.engine.startup.warm_up import DummySteps
from dsa_engine.engine.steps.context_buckets import Bucket
from dsa_engine.errors import CapacityError
from dsa_engine.kernels.runtime.launch import INTERPRETED
from dsa_engine.measure.requests import add_filled
from dsa_engine.sampling_params import SamplingParams
from dsa_engine.system.sizes import format_bytes
from dsa_engine.text.tokenizer import Tokenizer
from fake_cuda import FakeDevice
from library_stubs import install

pytestmark = [
    pytest.mark.skipif(INTERPRETED, reason="the interpreter needs values"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
]
MEMORY, UTILIZATION = 22 * 10**9, 0.9  # small, so that the caches take all of it
SIZES: dict[str, Any] = {
    "max_model_len": 32_768,
    "max_num_batched_tokens": 1024,
    "workspace": "64MiB",
    "max_num_seqs": 128,
}
SIZES |= {"hf_overrides": {"num_hidden_layers": 2, "first_k_dense_replace": 1}}
SIZES |= {"gpu_memory_utilization": UTILIZATION, "cache_memory": None}

SMALL = {"max_model_len": 9000, "max_num_seqs": 6, "hf_overrides": {"num_hidden_layers": 1}}


def test_the_tokenizer_of_masks_is_loaded_at_the_start(
    fake_engine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    loads: list[GrammarMasks] = []
    monkeypatch.setattr(GrammarMasks, "load", lambda self: loads.append(self))
    for lies in (False, True):
        monkeypatch.setattr(Tokenizer, "lies_in", lambda folder, lies=lies: lies)
        with FakeDevice() as device:
            engine = fake_engine(device, "deepseek_v32", 1, **SMALL)
            assert loads == [engine.runner.grammars] * lies


def test_no_step_takes_more_than_was_set_aside(fake_engine: Callable[..., Any]) -> None:
    """One of 64 ranks, with balanced routing and with 8 times as many tokens, and in micro-batches with experts that
    move."""
    for skew, dbo in ((1.0, False), (8.0, False), (1.0, True)):
        with FakeDevice(memory=MEMORY) as device:
            options = SIZES | {"enable_dbo": dbo, "cudagraph_capture_sizes": [2]}
            parallel = {"skew": skew, "rebalance_every": 1000 if dbo else None}
            engine = fake_engine(device, "deepseek_v32", 64, parallel, **options)
            assert len(device.captures) == 4, "contexts from 4,096 to 32,768"
            assert {name for name, _ in device.connected} == {"all_gather", "all_to_all", "reduce_scatter"}
            staged = len(engine.rebalancing.staging) if engine.rebalancing else 0
            assert staged == 3 * (7168 * 2048 + 56 * 16 * 4) * dbo, "an expert in FP8, within the bytes of a turn"
            connected, fixed = len(device.connected), device.live + device.outside
            # Weights, caches, memory outside of PyTorch and steps together use all that may be used, up to a page.
            assert abs(fixed + engine.step_bytes - UTILIZATION * MEMORY) < 1 << 20
            assert device.reserved + device.outside < UTILIZATION * MEMORY
            params = SamplingParams(temperature=1.0, top_k=20, top_p=0.9, max_tokens=4)
            request = engine.add([5] * 32_000, params)
            while not request.output:
                engine.step()
            engine.finish(request, "abort")
            add_filled(engine, 128, 2000, params)
            for _ in range(3):
                engine.step()
            used = device.reserved + device.outside
            print(f"skew {skew}, micro-batches {dbo}: {engine.step_bytes:,} set aside, {used - fixed:,} used")
            assert device.reserved + device.outside <= UTILIZATION * MEMORY
            assert len(device.connected) == connected, "every collective had run"
            assert len(device.captures) == 4, "two requests a rank were captured at the start"


def test_all_that_auto_may_choose_is_connected_at_the_start(
    fake_engine: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    """On 4 nodes of 8 ranks the smallest steps gather all tokens and others go by node; no step connects ranks that the
    start has not. The log says what communicators hold."""
    caplog.set_level("INFO")
    with FakeDevice() as device:
        options = {"max_model_len": 4096, "max_num_batched_tokens": 64, "enforce_eager": True}
        engine = fake_engine(device, "deepseek_v32", 32, {"node_size": 8, "moe_dispatch": "auto"}, **options)
        connected = set(device.connected)
        assert f"and other programs take {format_bytes(device.outside)} of the device" in caplog.text
        assert caplog.text.count("dispatch of at most") == 2, "the first prefill of each way; there are seven sizes"
        for tokens in (1, 3, 64):
            request = engine.add([5] * (32 * tokens), SamplingParams(max_tokens=1))
            while engine.has_work:
                engine.step()
            assert device.connected == connected, tokens
        ways = {name for name, _ in connected}
        assert ways == {"all_gather", "reduce_scatter", "all_to_all"} and request.finish_reason == "length"


def test_tables_of_penalties_and_biases_are_set_aside(fake_engine: Callable[..., Any]) -> None:
    """They have a row of the vocabulary for each of the maximum number of requests, in graphs and in eager steps."""
    sizes = SMALL | {"max_num_seqs": 8, "max_num_batched_tokens": 512, "workspace": "16MiB", "cache_memory": None}
    sizes |= {"speculative_config": {"num_speculative_tokens": 2}}
    penalised = SamplingParams(temperature=1.0, top_k=50, top_p=0.9, presence_penalty=0.1, max_tokens=8)
    with FakeDevice(memory=40 * 10**9) as device:
        # Without graphs, whose assumed sizes leave room that hides the tables.
        engine = fake_engine(device, "deepseek_v32", 1, **sizes, enforce_eager=True)
        before = device.live
        for params in (penalised, replace(penalised, logit_bias={7: 1.0}, logprobs=1)):
            requests = add_filled(engine, 8, 2000, params)
            with device.watched():
                engine.step()
                engine.step()
            print(f"{engine.step_bytes:,} set aside, {device.live - before:,} kept, {device.peak - before:,} used")
            assert device.peak - before <= engine.step_bytes
            for request in requests:
                engine.finish(request, "abort")
        assert device.live - before >= 2 * 4 * 8 * 129_280, "counts and biases"


def test_expanded_rows_are_set_aside(fake_engine: Callable[..., Any]) -> None:
    """As many as the workspace holds: a step of several requests sees more tokens than the largest steps of one."""
    sizes = SMALL | {"max_num_batched_tokens": 512, "workspace": "16MiB", "cache_memory": None, "enforce_eager": True}
    aside = []
    for chip in (90, 100):
        with FakeDevice(chip, memory=40 * 10**9) as device:
            engine = fake_engine(device, "deepseek_v32", 1, **sizes, kv_cache_dtype="fp8")
            aside.append(engine.step_bytes)
            request, before = engine.add([5] * 3000, SamplingParams(max_tokens=1)), device.live
            with device.watched():
                while engine.has_work:
                    engine.step()
            assert request.finish_reason == "length" and device.peak - before <= engine.step_bytes
    assert abs(aside[0] - aside[1] - (16 << 20)) < 1 << 16


def test_no_memory_waits_for_the_garbage_collector(fake_engine: Callable[..., Any]) -> None:
    """What the largest steps took would otherwise be missing from the caches, and an engine's memory from the next."""
    sizes = SMALL | {"max_num_batched_tokens": 512, "workspace": "16MiB", "cache_memory": None}
    params = SamplingParams(presence_penalty=0.1, logit_bias={7: 1.0}, max_tokens=8)
    gc.collect()
    gc.disable()
    try:
        with FakeDevice(memory=40 * 10**9) as device:
            engine = fake_engine(device, "deepseek_v32", 1, **sizes, speculative_config={"num_speculative_tokens": 2})
            add_filled(engine, 1, 2000, params)
            before = device.live
            gc.collect()
            assert device.live == before, "the largest steps have left nothing"
            engine.step()
            engine.step()
            before = device.live
            gc.collect()
            assert device.live == before, "steps have left nothing"
            del engine
            assert device.live < 1 << 20 < before
    finally:
        gc.enable()


def test_rows_along_the_rail_are_set_aside(fake_engine: Callable[..., Any]) -> None:
    """One of 16 ranks on 4 nodes, in micro-batches: a rail brings it all tokens of its ranks, and rounds are full."""
    parallel = {"skew": 16.0, "moe_dispatch": "by_node", "node_size": 4}
    sizes = SIZES | {"max_num_batched_tokens": 512, "max_num_seqs": 16, "enable_dbo": True, "enforce_eager": True}
    with FakeDevice(memory=40 * 10**9) as device:
        engine = fake_engine(device, "deepseek_v32", 16, parallel, **sizes)
        request, before = engine.add([5] * 512 * 16, SamplingParams(max_tokens=1)), device.live
        with device.watched():
            engine.step()
        assert request.num_computed_tokens == 512 * 16
        print(f"{engine.step_bytes:,} set aside, {device.peak - before:,} used")
        assert device.peak - before <= engine.step_bytes
        assert set(device.waits) >= {"event in placement.py:_ways"}


def test_rows_of_deep_ep_are_set_aside(fake_engine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """On few ranks decode steps of its capacity have more rows than larger ones, whose tokens are gathered."""
    calls = install(monkeypatch, "deep_ep")
    parallel, sizes = {"moe_dispatch": "deep_ep", "decode_dispatch": "deep_ep"}, SIZES | {"max_num_batched_tokens": 64}
    with FakeDevice(memory=60 * 10**9) as device:
        engine = fake_engine(device, "deepseek_v32", 2, parallel, **sizes)
        assert engine.mesh.experts.dispatchers[False].capacity == 64
        add_filled(engine, 128, 100, SamplingParams(max_tokens=4))
        before = device.live
        calls.clear()
        with device.watched():
            engine.step()
        assert [call.__name__ for call, *_ in calls] == ["low_latency_dispatch", "low_latency_combine"] * 2
        print(f"{engine.step_bytes:,} set aside, {device.peak - before:,} used")
        assert device.peak - before <= engine.step_bytes


def test_a_step_that_does_not_fit_is_named(fake_engine: Callable[..., Any]) -> None:
    with FakeDevice(memory=8 * 10**9) as device, pytest.raises(CapacityError, match="smaller max_num_batched_tokens"):
        fake_engine(device, "deepseek_v32", 64, **SIZES)


def test_more_replicas_than_memory(fake_engine: Callable[..., Any]) -> None:
    """One of 64 ranks holds 60 experts instead of 4, which leaves no room for caches."""
    replicas = 56 * 64
    wanted = f"the cache is too small.*, or fewer redundant_experts than {replicas}"
    with FakeDevice(memory=8 * 10**9) as device, pytest.raises(CapacityError, match=wanted):
        fake_engine(device, "deepseek_v32", 64, {"redundant_experts": replicas}, **SIZES)


def test_two_engines_capture_their_own_graphs(fake_engine: Callable[..., Any]) -> None:
    """All graphs of an engine have one stream and one pool, no other engine's; the other engine's memory stays."""
    with FakeDevice() as device:
        seen = []
        for sizes in (None, [1, 3], []):
            before = len(device.captures)
            engine = fake_engine(device, "deepseek_v32", 1, **SMALL, cudagraph_capture_sizes=sizes)
            seen.append(device.captures[before:])
            assert engine.step_bytes is None and not engine.scheduler.has_work
        # Up to 4,096, 8,192 and 9,024 tokens: 1, 2, 4 and 8 requests, 1 and 4, none.
        assert [len(captures) for captures in seen] == [12, 6, 0]
        add_filled(engine, 1, 100, SamplingParams(temperature=0.0, max_tokens=8))
        engine.step()
        assert len(device.captures) == 19, "when it first occurs"
        for captures in seen[:2]:
            assert all(capture.warmed_up and capture.launches for capture in captures)
            assert len({capture.stream for capture in captures}) == len({capture.pool for capture in captures}) == 1
        streams, pools = ({getattr(c, what) for c in device.captures} for what in ("stream", "pool"))
        assert len(streams) == len(pools) == 3 and None not in pools and 0 not in streams
        assert device.emptied == 0


def test_options_that_are_left_out_are_chosen(
    fake_engine: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    """The engine has them, and the log says them with their reasons, in two lines."""
    caplog.set_level("INFO")
    with FakeDevice() as device:
        engine = fake_engine(device, "deepseek_v32", 8, optimize="latency", max_num_seqs=12, max_model_len=9000)
    options, parallel = engine.options, engine.options.parallel
    assert (
        (parallel.cp_size, parallel.tp_size, parallel.moe_dispatch)
        == (8, 8, "auto")
        == (8, engine.mesh.tp.size, "auto")
    )
    assert (options.enable_dbo, options.max_num_seqs, options.max_num_batched_tokens) == (True, 12, 4096)
    assert options.kv_cache_dtype == "fp8" and engine.cache.format.coded
    values, reasons = [record.getMessage() for record in caplog.records if record.name.endswith("choice")]
    assert values.startswith("chosen for optimize=latency on 8 rank(s) on 1 node(s): kv_cache_dtype fp8, tp_size 8, ")
    assert "max_num_seqs" not in values + reasons and "tp_size: a decode step reads fewer weights" in reasons


def test_buckets_with_drafts_have_room_for_them(fake_engine: Callable[..., Any]) -> None:
    """The graphs are those that the first requests need."""
    with FakeDevice() as device:
        drafts = {"speculative_config": {"num_speculative_tokens": 2}}
        engine = fake_engine(device, "deepseek_v32", 2, **SMALL | drafts, cudagraph_capture_sizes=[1])
        assert DummySteps(engine.mesh, engine.options, 9000, 2).likely_buckets() == [(1, 9024), (1, 8192), (1, 4096)]
        greedy = {
            *(GraphKey(Bucket(1, 3, context), 0, 0, count_equal) for context in (4096, 8192, 9024)),
            *(GraphKey(Bucket(1, 2, context), 0, 0, count_equal) for context in (4096, 8192, 9024)),
            *(Bucket(1, 1, context) for context in (4096, 8192, 9024)),
        }
        assert set(engine.graphs._graphs) == greedy, "as requests run that decode, with 0 to 2 drafts"
        add_filled(engine, 1, 100, SamplingParams(temperature=0.0, max_tokens=8))
        engine.step()
        assert len(device.captures) == 9


def test_the_last_tokens_of_the_longest_context_need_no_larger_bucket(fake_engine: Callable[..., Any]) -> None:
    """The largest has room for drafts after the last token that a request may have."""
    with FakeDevice() as device:
        sizes = SMALL | {"max_model_len": 8192, "speculative_config": {"num_speculative_tokens": 3}}
        engine = fake_engine(device, "deepseek_v32", 1, **sizes, cudagraph_capture_sizes=[1])
        assert DummySteps(engine.mesh, engine.options, 8192, 3).likely_buckets() == [(1, 8256), (1, 4096)]
        (request,) = add_filled(engine, 1, 8185, SamplingParams(temperature=0.0, max_tokens=7))
        contexts = set()
        engine.runner.hooks.append(lambda plan: plan.decodes and contexts.add(plan.bucket.context))
        while request.finish_reason is None:
            engine.step()
        assert contexts == {8256} and len(device.captures) == 6
