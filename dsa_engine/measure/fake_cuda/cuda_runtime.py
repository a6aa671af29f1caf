"""As much of ``torch.cuda`` as the engine asks, for a device that is not there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

if TYPE_CHECKING:
    from dsa_engine.measure.fake_cuda.device import FakeDevice

_MULTIPROCESSORS = 132


class _Stream:
    def __init__(self, *_: Any, **__: Any):
        pass

    def wait_stream(self, stream: _Stream) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *error: Any) -> None:
        pass


@contextmanager
def replaced(device: FakeDevice) -> Iterator[None]:
    """Within, ``torch.cuda`` speaks of ``device``."""

    class Event:
        def __init__(self, **_: Any):
            pass

        def record(self, stream: Any = None) -> None:
            pass

        def synchronize(self) -> None:
            device.wait("event")

    class Graph:
        def replay(self) -> None:
            from dsa_engine.measure.fake_cuda.device import Launch

            device.launches.append(Launch("graph", "replay"))

        def reset(self) -> None:
            pass

    @contextmanager
    def graph(cuda_graph: Graph, **_: Any) -> Iterator[None]:
        before = len(device.launches)
        device.capturing = True
        try:
            yield
        finally:
            device.capturing = False
            device.captured = device.launches[before:]
            del device.launches[before:]

    stream = _Stream()
    instead: dict[str, Any] = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda *_: None,
        "current_stream": lambda *_: stream,
        "Stream": _Stream,
        "stream": lambda s: s,
        "Event": Event,
        "CUDAGraph": Graph,
        "graph": graph,
        "graph_pool_handle": lambda: (0, 0),
        "is_current_stream_capturing": lambda: device.capturing,
        "synchronize": lambda *_: device.wait("synchronize"),
        "empty_cache": lambda: None,
        "mem_get_info": lambda *_: (device.memory - device.live, device.memory),
        "memory_reserved": lambda *_: device.live,
        "memory_allocated": lambda *_: device.live,
        "max_memory_allocated": lambda *_: device.peak,
        "reset_peak_memory_stats": lambda *_: setattr(device, "peak", device.live),
        "get_device_capability": lambda *_: divmod(device.capability, 10),
        "get_device_name": lambda *_: f"fake sm_{device.capability}",
        "get_device_properties": lambda *_: SimpleNamespace(
            multi_processor_count=_MULTIPROCESSORS,
            total_memory=device.memory,
            name=f"fake sm_{device.capability}",
            major=device.capability // 10,
            minor=device.capability % 10,
        ),
    }
    with ExitStack() as stack:
        for name, value in instead.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, value))
        on_host = torch.Generator  # a device has its own kind
        stack.enter_context(mock.patch.object(torch, "Generator", lambda *_: on_host()))
        yield
