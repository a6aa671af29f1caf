"""Decode in padded steps of static shape, as CUDA graphs replay them, and with several rows a request: same tokens.

On a GPU the graphs are captured, with the CPU's kernels the steps are recorded. Under ``TRITON_INTERPRET=1``, and on a
CPU without kernels, the same padded steps run kernel by kernel.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dsa_engine import LLM, SamplingParams
from dsa_engine.engine.steps.context_buckets import ContextBuckets
from dsa_engine.engine.steps.graphs import DecodeGraphs
from dsa_engine.kernels.runtime import cpu
from dsa_engine.kernels.runtime.launch import INTERPRETED
from fake_cuda import FakeDevice

CUDA = torch.cuda.is_available() and not INTERPRETED
CAPTURES = CUDA or (not INTERPRETED and cpu.library() is not None)
KERNELS = pytest.mark.skipif(not (CUDA or INTERPRETED), reason="needs kernels: a GPU, or TRITON_INTERPRET=1")


@pytest.mark.skipif(INTERPRETED or torch.cuda.is_available(), reason="needs a device that is not there")
@pytest.mark.parametrize("error", [KeyboardInterrupt, torch.OutOfMemoryError])
def test_a_capture_is_ended_before_anything_else(error: type[BaseException], monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupt waits for its end; another error is raised as it is, not as that of streams that have not joined."""
    before, finished = signal.signal(signal.SIGINT, signal.default_int_handler), []

    def function() -> torch.Tensor:
        if device.capturing:
            if error is not KeyboardInterrupt:
                raise error("CUDA out of memory")
            signal.raise_signal(signal.SIGINT)
        finished.append(device.capturing)
        return torch.empty(1, device="cuda")

    def end(graph: Any) -> None:
        device.end_capture(None)
        if error is not KeyboardInterrupt:
            raise RuntimeError("CUDA error: capturing has streams that have not joined")

    try:
        with FakeDevice() as device:
            monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_end", end)
            mesh = SimpleNamespace(device=torch.device("cuda:0"))
            model: Any = SimpleNamespace(runtime=SimpleNamespace(mesh=mesh), loads=None)
            nothing: Any = None
            graphs = DecodeGraphs(model, nothing)
            with pytest.raises(error):
                graphs.run("a step", function)
            assert finished == ([False, True] if error is KeyboardInterrupt else [False]) and not device.capturing
            assert not graphs.captured and not graphs.ready("a step")
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(
    "model_type, ahead",
    [
        pytest.param("deepseek_v32", False, marks=pytest.mark.slow),
        ("deepseek_v32", True),
        pytest.param("deepseek_v3", True, marks=[pytest.mark.slow, KERNELS]),
    ],
)
def test_padded_steps(
    model_type: str, ahead: bool, oracle: Callable[..., Any], random_ids: Callable[..., list[int]]
) -> None:
    """Three sequences in a bucket of four: one selects, one begins to select while it decodes, one sees few tokens."""
    model = oracle(model_type, num_hidden_layers=2)
    prompts = [random_ids(70), random_ids(62, seed=1), random_ids(3, seed=2)]
    llm = LLM(
        model.folder,
        kernels="triton",  # comparing them with their references takes long in the interpreter
        device="cuda" if CUDA else "cpu",
        dtype="float32",
        max_model_len=128,
        page_size=16,
        cache_memory="2MiB",
        enforce_eager=True,
    )
    engine = llm.engine
    engine.async_scheduling = ahead
    params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
    steps, before = [], []

    class Counted(DecodeGraphs):
        def forward(self, step: Any, sampled: torch.Tensor | None) -> Any:
            steps.append([sum(s.length for s in step.own.segments)])
            before.append(sampled is not None)
            return super().forward(step, sampled)

    engine.runner.graphs = Counted(engine.model, engine.cache, capture=CAPTURES, contexts=ContextBuckets(fewest=64))
    padded = [o.token_ids for o in llm.generate(prompts, params)]
    assert padded == [model.greedy(prompt, 5) for prompt in prompts]
    assert steps == [[3]] * 4  # the first token comes with the prefill
    # The first one is captured, and the step in flight is read before.
    assert before == [ahead and not CAPTURES, ahead, ahead, ahead]
    if CAPTURES:
        assert engine.runner.graphs.captured == [(4, 128)] and engine.runner.graphs.memory_bytes > 0


@KERNELS
def test_padded_steps_over_fp8_caches(oracle: Callable[..., Any], random_ids: Callable[..., list[int]]) -> None:
    """One sequence selects, one begins to select while it decodes."""
    model = oracle("deepseek_v32", num_hidden_layers=1, index_topk=16, kv_lora_rank=128, index_head_dim=16)
    llm = LLM(
        model.folder,
        kernels="triton",  # comparing them with their references takes long in the interpreter
        device="cuda" if CUDA else "cpu",
        dtype="float32",
        kv_cache_dtype="fp8",
        max_model_len=32,
        page_size=16,
        cache_memory="2MiB",
        enforce_eager=True,
    )
    engine, params = llm.engine, SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    prompts = [random_ids(20), random_ids(15, seed=1)]
    plain = [out.token_ids for out in llm.generate(prompts, params)]
    engine.runner.graphs = DecodeGraphs(
        engine.model, engine.cache, capture=CAPTURES, contexts=ContextBuckets(fewest=32)
    )
    assert [out.token_ids for out in llm.generate(prompts, params)] == plain
