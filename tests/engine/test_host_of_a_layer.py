"""What the host does for a layer that is launched kernel by kernel, by counts: calls of functions and operations."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import pytest
import torch

import dsa_engine
from dsa_engine import SamplingParams
from dsa_engine.kernels.runtime.launch import INTERPRETED
from dsa_engine.measure.requests import add_filled
from fake_cuda import FakeDevice

pytestmark = [
    pytest.mark.skipif(INTERPRETED, reason="the interpreter needs values"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
]
PACKAGE = str(Path(dsa_engine.__file__).parent)
GREEDY = SamplingParams(temperature=0.0, max_tokens=8)


class Calls(NamedTuple):
    """Calls by the engine's code in a layer: of its own functions, and of functions in C, such as PyTorch's operations,
    strides and sizes of tensors; and the launches."""

    own: int
    builtin: int
    launches: int


def calls_of_layers(device: FakeDevice, engine: Any, run: Callable[[], object]) -> list[Calls]:
    """The calls of each layer but the last, in the pass that ``run`` makes."""
    own = builtin = 0
    marks: list[Calls] = []

    def called(frame: FrameType, event: str, _: Any) -> None:
        nonlocal own, builtin
        by = frame if event == "c_call" else frame.f_back
        if by is None or not by.f_code.co_filename.startswith(PACKAGE):
            return
        own += event == "call" and frame.f_code.co_filename.startswith(PACKAGE)
        builtin += event == "c_call"

    def mark(*_: Any) -> None:
        marks.append(Calls(own, builtin, len(device.launches)))

    hooks = [layer.register_forward_pre_hook(mark) for layer in engine.model.layers]
    with device.watched():
        sys.setprofile(called)
        try:
            run()
        finally:
            sys.setprofile(None)
    for hook in hooks:
        hook.remove()
    return [Calls(*(b - a for a, b in zip(*both, strict=True))) for both in zip(marks, marks[1:], strict=False)]


# Maxima of one rank of 64, FP8 weights and caches: a dense layer and one with experts, in a prefill of 128 rows a rank
# and in a decode step of a request a rank.
HELD = {
    "prefill": (Calls(370, 350, 35), Calls(670, 600, 70)),
    "decode": (Calls(310, 290, 25), Calls(500, 400, 37)),
}


def test_calls_of_a_layer(fake_engine: Callable[..., Any]) -> None:
    layers = {"num_hidden_layers": 4, "first_k_dense_replace": 2}
    options = {"kv_cache_dtype": "fp8", "enforce_eager": True, "enable_prefix_caching": False}
    parallel = {"tp_size": 8, "node_size": 8, "moe_dispatch": "auto"}
    seen: dict[str, tuple[Calls, Calls]] = {}
    with FakeDevice() as device:
        engine = fake_engine(device, "deepseek_v32", 64, parallel, hf_overrides=layers, **options)
        for _ in range(2):  # the first makes plans
            request = engine.add([5] * 8192, GREEDY)
            step = engine.scheduler.schedule()
            plan = engine.runner.plan(step)
            counted = calls_of_layers(device, engine, lambda plan=plan: engine.runner.launch(plan))
            engine.scheduler.launched(step)
            engine.finish(request, "abort")
        seen["prefill"] = counted[1], counted[2]
        for _ in range(64):
            add_filled(engine, 100_000, GREEDY)
        for _ in range(2):
            counted = calls_of_layers(device, engine, engine.step)
        seen["decode"] = counted[1], counted[2]
    print(seen)
    for name, both in HELD.items():
        for held, calls in zip(both, seen[name], strict=True):
            assert all(a <= b for a, b in zip(calls, held, strict=True)), f"{name}: {calls}, more than {held}"
