"""When CUDA graphs are captured, on which stream and into which memory: on a device that is not there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from dsa_engine.kernels.launch import INTERPRETED
from dsa_engine.measure.fake_cuda import FakeDevice
from dsa_engine.sampling_params import SamplingParams

pytestmark = [
    pytest.mark.skipif(INTERPRETED, reason="the interpreter needs values"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
]
GREEDY = SamplingParams(temperature=0.0, max_tokens=8)


def test_an_engine_has_one_capture_stream_and_one_pool(fake_engine: Callable[..., Any]) -> None:
    """Of its own: cuBLAS workspaces are as many as streams, and no engine's graphs lie in another's memory."""
    with FakeDevice() as device:
        small = {"cache_memory": "1GiB"}
        streams, pools = [], []
        for _ in range(2):
            engine, before = fake_engine(device, "deepseek_v32", 1, **small), len(device.captures)
            for length in (1000, 9000):  # two buckets
                engine.add_filled(length, GREEDY)
                engine.step()  # reads what is in flight before something is captured
                engine.step()
            captures = device.captures[before:]
            assert len(captures) == 2 and all(capture.warmed_up and capture.launches for capture in captures)
            assert len({capture.stream for capture in captures}) == len({capture.pool for capture in captures}) == 1
            streams.append(captures[0].stream)
            pools.append(captures[0].pool)
        assert len(set(streams)) == len(set(pools)) == 2 and None not in pools and 0 not in streams
        assert device.emptied == 0, "what other engines keep for their next step"
