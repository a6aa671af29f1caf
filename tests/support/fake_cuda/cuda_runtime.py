"""The part of ``torch.cuda`` that the engine uses, for a fake device."""

from __future__ import annotations

import itertools
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

from dsa_engine.kernels.runtime import launch
from fake_cuda.events import Launch

if TYPE_CHECKING:
    from fake_cuda.device import FakeDevice

_MULTIPROCESSORS = 132
_POOL = 32  # streams that PyTorch hands out, round robin


class _Stream:
    """A stream of a device; number 0 is the default one."""

    def __init__(self, device: FakeDevice, number: int):
        self._device = device
        self.number = number

    def wait_stream(self, stream: _Stream) -> None:
        self.wait(self._device.reached[stream.number])

    def wait_event(self, event: Any) -> None:
        self.wait(event.reached)

    def wait(self, reached: Counter[int]) -> None:
        self._device.reached[self.number] |= reached

    def __enter__(self) -> _Stream:
        self._before = self._device.stream
        self._device.stream = self.number
        return self

    def __exit__(self, *error: Any) -> None:
        self._device.stream = self._before


@contextmanager
def replaced(device: FakeDevice) -> Iterator[None]:
    """Inside the context ``torch.cuda`` describes ``device``."""

    class Event:
        def __init__(self, **_: Any):
            self.reached: Counter[int] = Counter()

        def record(self, stream: Any = None) -> None:
            self.reached = device.reached[device.stream if stream is None else stream.number].copy()

        def synchronize(self) -> None:
            device.wait("event", self.reached)

        def query(self) -> bool:
            return True

        def elapsed_time(self, end: Event) -> float:
            return 0.0

    streams, pools = itertools.count(), itertools.count(1)
    users: dict[int, weakref.ref[_Stream]] = {}

    def new_stream(*_: Any, **__: Any) -> _Stream:
        number = 1 + next(streams) % _POOL
        if number in users and users[number]() is not None:
            raise RuntimeError(f"two users get stream {number}: PyTorch has {_POOL}")
        stream = _Stream(device, number)
        users[number] = weakref.ref(stream)
        return stream

    class Graph:
        def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
            if device.stream == 0:
                raise RuntimeError("CUDA captures no graph on the default stream")
            self._pool = pool
            device.begin_capture()

        def capture_end(self) -> None:
            device.end_capture(self._pool)

        def replay(self) -> None:
            device.launch(Launch("graph", "replay"))

        def reset(self) -> None:
            pass

    instead: dict[str, Any] = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda *_: None,
        "current_stream": lambda *_: _Stream(device, device.stream),
        "Stream": new_stream,
        "stream": lambda s: s,
        "set_stream": lambda s: setattr(device, "stream", s.number),
        "Event": Event,
        "CUDAGraph": Graph,
        "graph_pool_handle": lambda: (0, next(pools)),
        "is_current_stream_capturing": lambda: device.capturing,
        "cudart": lambda: SimpleNamespace(cudaHostRegister=device.pin_range, cudaHostUnregister=device.unpin_range),
        "synchronize": lambda *_: device.wait("synchronize"),
        "empty_cache": device.empty_cache,
        "mem_get_info": lambda *_: (device.memory - device.outside - device.reserved, device.memory),
        "memory_reserved": lambda *_: device.reserved,
        "memory_allocated": lambda *_: device.live,
        "max_memory_allocated": lambda *_: device.peak,
        "reset_peak_memory_stats": lambda *_: setattr(device, "peak", device.live),
        "get_device_capability": lambda *_: divmod(device.capability, 10),
        "get_device_name": lambda *_: f"fake sm_{device.capability}",
        "get_device_properties": lambda *_: SimpleNamespace(
            multi_processor_count=_MULTIPROCESSORS,
            total_memory=device.memory,
            L2_cache_size=50 << 20,
            name=f"fake sm_{device.capability}",
            major=device.capability // 10,
            minor=device.capability % 10,
        ),
    }
    with ExitStack() as stack:
        stack.callback(launch.chip_of_device.cache_clear)
        for name, value in instead.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, value))
        on_host = torch.Generator  # a device has a generator of another type
        stack.enter_context(mock.patch.object(torch, "Generator", lambda *_: on_host()))
        yield
