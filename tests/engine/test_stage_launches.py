"""Launches of each stage of a decode step on the fake device: those that the planner counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from dsa_engine.commands.planner.prediction.efficiency import KERNELS, TOP_K
from dsa_engine.config.model import ModelConfig
from dsa_engine.config.released import released_config
from dsa_engine.convert.schemes import target_scheme
from dsa_engine.kernels.runtime.launch import INTERPRETED
from dsa_engine.measure.filled_requests import add_filled
from dsa_engine.model.profile_stages import set_observer
from dsa_engine.sampling_params import SamplingParams
from fake_cuda import FakeDevice

pytestmark = [
    pytest.mark.skipif(INTERPRETED, reason="the interpreter needs values"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
]


class StageLaunches:
    """Counts the launches inside each stage, but collectives."""

    def __init__(self, device: FakeDevice):
        self.counts: Counter[str] = Counter()
        self._device, self._stages, self._seen = device, ["other"], 0

    def enter(self, name: str) -> None:
        self._count()
        self._stages.append(name)

    def leave(self) -> None:
        self._count()
        self._stages.pop()

    def _count(self) -> None:
        new = self._device.launches[self._seen :]
        self._seen += len(new)
        self.counts[self._stages[-1]] += sum(launch.kind != "collective" for launch in new)


LAYERS = {"num_hidden_layers": 2, "first_k_dense_replace": 1}
BOTH = {"MLA prolog", "indexer prolog", "lightning indexer", "sparse flash attention", "MLA epilog"}


@pytest.mark.parametrize(
    ("products", "rows"), [("plain", 1), ("fp8", 1), ("fp8_many", 20), ("int8", 1)], ids=lambda value: str(value)
)
def test_the_planner_counts_the_launches_of_a_layer(fake_engine: Callable[..., Any], products: str, rows: int) -> None:
    """``rows``: of each rank."""
    overrides: dict[str, Any] = dict(LAYERS)
    if products == "int8":
        released = released_config("deepseek_v32")
        made = target_scheme("int8", ModelConfig.from_dict(released, LAYERS)).config
        overrides["quantization_config"] = dict.fromkeys(released["quantization_config"]) | made
    with FakeDevice() as device:
        engine = fake_engine(
            device,
            "deepseek_v32",
            64,
            {"decode_dispatch": "all_gather"},
            quantization="dequantize" if products == "plain" else None,
            kv_cache_dtype="fp8",
            max_num_seqs=64 * rows,
            hf_overrides=overrides,
        )
        for _ in range(64 * rows):
            add_filled(engine, 100_000 // rows, SamplingParams(temperature=0.0, max_tokens=8))
        launches = StageLaunches(device)
        with device.watched():
            set_observer(launches)
            try:
                engine.step()
            finally:
                set_observer(None)
        launches.enter("after the step")
    counts = launches.counts
    counts["MoE gate"] += counts.pop("MoE dispatch")
    expected = {name: getattr(kernels, products) for name, kernels in KERNELS.items()}
    expected["lightning indexer"] += expected.pop(TOP_K) - (rows > 1)  # many rows are not cut into slices
    expected = {name: count * (2 if name in BOTH else 1) for name, count in expected.items()}
    expected["lightning indexer"] += 1  # the first layer uploads the segments
    assert +counts == expected
