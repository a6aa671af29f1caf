"""A CUDA device that is not there: the engine's own code runs on tensors that have shapes and no values.

Everything but the arithmetic is real: the plans, the host's tensors, allocations, launch parameters, the order of
streams and collectives. So a machine without a GPU can count what a step launches, where the host would wait for the
device, and how many bytes live at once, at production sizes and for any number of ranks.
"""

from fake_cuda.device import FakeDevice
from fake_cuda.events import Capture, Launch
from fake_cuda.world import FakeConfig

__all__ = ["Capture", "FakeConfig", "FakeDevice", "Launch"]
