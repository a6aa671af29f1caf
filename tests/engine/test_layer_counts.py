"""Launches of a layer of DeepSeek-V3.2 with experts, counted on the fake device at its sizes, without collectives: the
tables of ``benchmarks/results/launches_of_a_layer.md``, printed by ``pytest -m slow -s``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from dsa_engine.commands.planner.predict import LAYER_LAUNCHES, STEP_LAUNCHES
from dsa_engine.config.model import ModelConfig
from dsa_engine.config.released import released_config
from dsa_engine.engine.engine import Engine
from dsa_engine.kernels.runtime.launch import INTERPRETED
from dsa_engine.measure.requests import add_filled
from dsa_engine.model import profile_stages
from dsa_engine.sampling_params import SamplingParams
from dsa_engine.weights.convert.schemes import target_scheme
from fake_cuda import FakeDevice

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(INTERPRETED, reason="the interpreter needs values"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
]
GREEDY = SamplingParams(temperature=0.0, max_tokens=8)


class ByStage:
    """Kernels by the innermost stage in which they are launched."""

    def __init__(self, device: FakeDevice) -> None:
        self.kernels: list[tuple[str, str]] = []
        self._device, self._stages, self._seen = device, ["outside"], len(device.launches)

    def _count(self) -> None:
        new = [one for one in self._device.launches[self._seen :] if one.kind != "collective"]
        self.kernels += [(self._stages[-1], one.name) for one in new]
        self._seen = len(self._device.launches)

    def enter(self, name: str) -> None:
        self._count()
        self._stages.append(name)

    def leave(self) -> None:
        self._count()
        self._stages.pop()


@contextmanager
def by_stage(device: FakeDevice) -> Iterator[ByStage]:
    watched = ByStage(device)
    profile_stages.set_hook(watched)
    try:
        yield watched
        watched._count()
    finally:
        profile_stages.set_hook(None)


def stored(name: str) -> dict[str, Any]:
    """What makes a configuration with FP8 weights one of ``name``."""
    released = released_config("deepseek_v32")
    config: dict[str, Any] = dict.fromkeys(released["quantization_config"])  # null leaves a key out
    if name == "INT8":
        plain = ModelConfig.from_dict(released | {"quantization_config": None})
        config |= target_scheme("int8", plain).config
    return {"quantization_config": {"FP8": {}, "INT8": config, "bfloat16": None}[name]}


@pytest.mark.parametrize(("name", "rows"), [("bfloat16", 1), ("FP8", 1), ("FP8", 32), ("INT8", 1)])
def test_a_decode_layer(name: str, rows: int, fake_engine: Callable[..., Engine]) -> None:
    counts = []
    for layers in (4, 3):
        with FakeDevice() as device:
            sizes = {"num_hidden_layers": layers, "first_k_dense_replace": 1} | stored(name)
            how = {"kv_cache_dtype": "fp8", "hf_overrides": sizes, "max_num_seqs": 64 * rows}
            engine = fake_engine(device, "deepseek_v32", 64, {"decode_dispatch": "all_gather"}, **how)
            add_filled(engine, 64 * rows, 2_000, GREEDY)
            with by_stage(device) as watched:
                engine.step()
        counts.append(Counter(watched.kernels))
    layer = counts[0] - counts[1]
    stages = Counter[str]()
    for (one, _), number in layer.items():
        stages[one] += number
    print(name, rows, "layer", layer.total(), "step", (counts[1]).total() - 3 * layer.total(), dict(stages))
    print(sorted(layer.items()))
