"""What the device does while the host waits for the counts of an all-to-all: launches and streams on a fake device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from dsa_engine.kernels.runtime.launch import INTERPRETED
from dsa_engine.sampling_params import SamplingParams
from fake_cuda import FakeDevice, Launch

pytestmark = pytest.mark.skipif(INTERPRETED or torch.cuda.is_available(), reason="a fake device is another one")


def begun(launches: list[Launch], send: int) -> Counter[int]:
    """How many launches of each stream end before a collective begins, if collectives of all groups begin in the order
    of the host (NCCL_LAUNCH_ORDER_IMPLICIT)."""
    before = Counter(launches[send].before)
    for one in launches[:send]:
        before |= Counter(one.before) if one.kind == "collective" else Counter()
    return before


def micro_batches(device: FakeDevice) -> Iterator[tuple[int, int]]:
    """For each micro-batch in each layer: number of launches before its gate, and before the host waits for counts."""
    launches = device.launches
    gates = [at for at, one in enumerate(launches) if one.name == "route_kernel"]
    reads = [
        next(at for at in device.waited if at > max(gate, other))
        for gate, other in zip(gates, [0, *gates], strict=False)
    ]
    return zip(gates, reads, strict=True)


@pytest.mark.parametrize("skew", [1.0, 5.0])
@pytest.mark.parametrize("method", ["all_to_all", "by_node"])
def test_the_device_works_beside_the_wait_and_the_tokens(
    fake_engine: Callable[..., Any], method: str, skew: float
) -> None:
    """Between the exchange of a micro-batch's counts and the host's wait for them, the other one's attention or experts
    are launched. Tokens are packed and begin to travel beside these. With skew they travel in rounds."""
    parallel = {"node_size": 4, "tp_size": 4, "moe_dispatch": method, "skew": skew}
    with FakeDevice() as device:
        engine = fake_engine(device, "deepseek_v32", 8, parallel, quantization="dequantize", enable_dbo=True)
        engine.add([5] * 65_536, SamplingParams(max_tokens=1))
        with device.watched():
            engine.runner.launch(engine.runner.plan(engine.scheduler.schedule()))
    launches, turns = device.launches, list(micro_batches(device))
    assert len(turns) == 4, "two layers with experts"
    for turn, (gate, read) in enumerate(turns):

        def after(launched: int, name: str) -> int:
            return next(at for at, one in enumerate(launches) if at > launched and one.name == name)

        other = after(gate, "aten::_grouped_mm" if turn % 2 else "sparse_attention_kernel")
        assert after(gate, "all_gather") < other < read
        packs, travels = launches[after(read - 1, "pack_tokens_kernel")], after(read - 1, "all_to_all")
        assert packs.stream > 0 and packs.before[0] <= launches[other].before[0]
        assert begun(launches, travels)[0] <= launches[other].before[0]
