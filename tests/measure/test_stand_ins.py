"""Work in place of other ranks is recorded in one run and timed separately, in the same way as in the step."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from dsa_engine.config.released import released_config
from dsa_engine.engine.startup.start import start
from dsa_engine.kernels.runtime.launch import INTERPRETED
from dsa_engine.measure.emulation.config import EmulatedConfig
from dsa_engine.measure.emulation.mesh import EmulatedMesh, follow_steps
from dsa_engine.measure.emulation.overlap_model import watched
from dsa_engine.measure.emulation.stand_ins import StandIns, stand_in
from dsa_engine.measure.filled_requests import add_filled
from dsa_engine.options import EngineOptions
from dsa_engine.sampling_params import SamplingParams
from fake_cuda import FakeDevice

CPU = torch.device("cpu")


@dataclass
class Made:
    times: int = 0

    def __call__(self) -> int:
        self.times += 1
        return self.times


def test_every_call_is_run_again_as_often_as_it_was_made() -> None:
    noted, first, second = StandIns(), Made(), Made()
    with noted.noting():
        assert [stand_in("layer", first), stand_in("layer", first), stand_in("head", second)] == [1, 2, 1]
    stand_in("layer", first)  # not recorded
    before = (first.times, second.times)
    assert noted.seconds(CPU) > 0
    runs = second.times - before[1]
    assert runs > 1 and first.times - before[0] == 2 * runs


def test_passes_alike_have_the_same_work() -> None:
    def of(*names: str, in_graph: bool = False) -> StandIns:
        noted = StandIns(in_graph)
        with noted.noting():
            for name in names:
                stand_in(name, Made())
        return noted

    assert of("a", "b", "a").work == of("a", "a", "b").work
    assert len({one.work for one in (of("a"), of("a", "a"), of("b"), of("a", in_graph=True), of())}) == 5


@pytest.mark.skipif(INTERPRETED or torch.cuda.is_available(), reason="needs a device that is not there")
@pytest.mark.parametrize("eager", [False, True])
def test_stand_ins_of_a_replayed_step_are_timed_as_a_graph(tmp_path: Path, eager: bool, monkeypatch: Any) -> None:
    """A decode step of one rank of 64 on a fake device: it is replayed when timed, not when watched, and
    the work in place of the other ranks is captured if the step is, and then waits for nothing."""
    (tmp_path / "config.json").write_text(json.dumps(released_config("deepseek_v32")))
    captured: list[set[Any]] = []
    capture = StandIns._captured
    monkeypatch.setattr(StandIns, "_captured", lambda self, on: captured.append(self._collectives) or capture(self, on))
    # The fake device computes no values.
    monkeypatch.setattr(EmulatedMesh, "all_gather_int", lambda mesh, value: [value] * mesh.world_size)
    layers = {"num_hidden_layers": 2, "first_k_dense_replace": 1}
    with FakeDevice() as device:
        parallel = EmulatedConfig(emulate_world=64)
        options = EngineOptions(
            tmp_path,
            device="cuda",
            kernels="triton",
            load_format="dummy",
            hf_overrides=layers,
            progress=False,
            parallel=parallel,
            enforce_eager=eager,
            cache_memory="4GiB",  # no trial of the largest steps: what arrives in an all-to-all depends on values
        )
        engine = start(tmp_path, options)
        assert isinstance(engine.mesh, EmulatedMesh)
        follow_steps(engine)
        for _ in range(64):
            add_filled(engine, 4000, SamplingParams(temperature=0.0, max_tokens=8))
        engine.step()
        with device.watched():
            engine.step()
        assert device.count("graph") == (0 if eager else 1)
        with watched(engine) as one:
            engine.step()
        assert one.stand_ins > 0
    kinds = [{name[0] for name in names} for names in captured]
    assert kinds == ([] if eager else [{"all_gather", "reduce_scatter"}])
