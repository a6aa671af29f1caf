"""Launches of a layer of DeepSeek-V3.2 with experts, counted on the fake device at its sizes: the tables of
``benchmarks/results/launches_of_a_layer.md``, printed by ``pytest -m slow -s tests/engine/test_layer_counts.py``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
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
from dsa_engine.model.model import DecoderLayer
from dsa_engine.sampling_params import SamplingParams
from dsa_engine.weights.convert.schemes import target_scheme
from fake_cuda import FakeDevice

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(INTERPRETED, reason="the interpreter needs values"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
]
GREEDY = SamplingParams(temperature=0.0, max_tokens=8)


def kernels(launches: Any) -> int:
    return sum(one.kind not in ("collective", "graph") for one in launches)


class ByStage:
    """Kernels by the innermost stage in which they are launched."""

    def __init__(self, device: FakeDevice) -> None:
        self.counts = Counter[str]()
        self._device, self._stages, self._seen = device, ["no stage"], len(device.launches)

    def _count(self) -> None:
        self.counts[self._stages[-1]] += kernels(self._device.launches[self._seen :])
        self._seen = len(self._device.launches)

    def enter(self, name: str) -> None:
        self._count()
        self._stages.append(name)

    def leave(self) -> None:
        self._count()
        self._stages.pop()


def stored_as(name: str) -> dict[str, Any]:
    """Overrides that make the weights of a released configuration, FP8, those of another."""
    released = released_config("deepseek_v32")
    keys: dict[str, Any] = dict.fromkeys(released["quantization_config"])  # null leaves a key out
    if name == "INT8":
        plain = ModelConfig.from_dict(released | {"quantization_config": None})
        return {"quantization_config": keys | target_scheme("int8", plain).config}
    return {} if name == "FP8" else {"quantization_config": None}


NAMES = (*profile_stages.STAGES[1:6], *profile_stages.STAGES[7:11])  # attention's; gate, dispatch, experts, shared
STAGES = {
    ("bfloat16", 1): [7, 4, 2, 2, 3, 2, 1, 4, 3],
    ("FP8", 1): [7, 4, 2, 2, 3, 2, 2, 4, 3],
    ("FP8", 32): [7, 4, 2, 2, 4, 2, 1, 4, 3],
    ("INT8", 1): [11, 6, 2, 2, 5, 2, 2, 5, 7],
}


@pytest.mark.parametrize(("weights", "rows"), STAGES)
def test_a_decode_layer(
    weights: str, rows: int, fake_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By stage, of rank 0 of 64, without collectives; and in a captured step, with what is outside of layers."""
    stages, together = Counter[str](), list[int]()
    for layers in (1, 2):
        with FakeDevice() as device:
            sizes = {"num_hidden_layers": layers, "first_k_dense_replace": 0} | stored_as(weights)
            how = {"kv_cache_dtype": "fp8", "hf_overrides": sizes, "max_num_seqs": 64 * rows}
            engine = fake_engine(device, "deepseek_v32", 64, {"decode_dispatch": "all_gather"}, **how)
            add_filled(engine, 64 * rows, 2_000, GREEDY)
            engine.step()  # warms up and captures
            with device.watched():
                engine.step()
            together.append(kernels(device.captures[0].launches) + kernels(device.launches))
            hook = ByStage(device)
            monkeypatch.setattr(profile_stages, "_hook", hook)
            engine.step()
            monkeypatch.undo()
        stages.update({name: count if layers == 2 else -count for name, count in hook.counts.items()})
    one, two = together
    print(weights, rows, two - one, 2 * one - two, *(f"{name} {count}" for name, count in stages.items() if count))
    assert [stages[name] for name in NAMES] == STAGES[weights, rows]
    assert stages.total() == two - one
    if weights == "FP8":
        assert (two - one, 2 * one - two) == (LAYER_LAUNCHES, STEP_LAUNCHES)


LAYERS = {
    1: ((39, 0, 0, 4, 2804), (28, 0, 0, 4, 9)),
    8: ((51, 4, 1, 5, 2854), (31, 2, 0, 5, 9)),
    64: ((47, 4, 1, 5, 926), (31, 2, 0, 5, 9)),
}


@pytest.mark.parametrize("world", LAYERS)
def test_prefill_and_decode(world: int, fake_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer of a chunk of 8,192 tokens a rank, 2,048 of 64, and of a captured step with two rows a rank, one of 64,
    all-to-all: launches, collectives among them, the host's waits, streams, and MiB beside what lived before."""
    seen: list[tuple[int, int, int, int, float]] = []
    with FakeDevice() as device:
        forward = DecoderLayer.forward

        def counted(layer: DecoderLayer, *args: Any) -> Any:
            launched, waits, live = len(device.launches), len(device.waits), device.live
            device.peak = live
            result = yield from forward(layer, *args)
            new = device.launches[launched:]
            streams, added = len({one.stream for one in new}), (device.peak - live) / 2**20
            seen.append((len(new), len(new) - kernels(new), len(device.waits) - waits, streams, round(added)))
            return result

        engine = fake_engine(device, "deepseek_v32", world, kv_cache_dtype="fp8")
        monkeypatch.setattr(DecoderLayer, "forward", counted)
        request = engine.add([5] * min(8192 * world, 131_072), GREEDY)
        step = engine.scheduler.schedule()
        engine.runner.launch(engine.runner.plan(step))
        engine.scheduler.launched(step)
        engine.finish(request, "abort")
        prefill = seen[-1]
        add_filled(engine, min(2 * world, 64), 100_000, GREEDY)
        engine.step()
    print(world, prefill, seen[-1])
    assert (prefill, seen[-1]) == LAYERS[world]
