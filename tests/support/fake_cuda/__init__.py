"""A fake CUDA device: the engine's own code runs on tensors that have shapes and no values.

Everything but the arithmetic is real: the plans, the host's tensors, allocations, launch parameters, the order of
streams and collectives. So a machine without a GPU can count the launches of a step, the host's waits for the device,
and the bytes in use, at production sizes and for any number of ranks.
"""

from fake_cuda.device import FakeDevice
from fake_cuda.events import Capture, Launch
from fake_cuda.world import FakeConfig

__all__ = ["Capture", "FakeConfig", "FakeDevice", "Launch"]
